"""How far Serve's calls stay behind their requests."""

from __future__ import annotations

import asyncio

BEHIND_S = 0.002
BURST_S = 0.05


class CallDelay:
    """A call takes some milliseconds of the gateway's loop and of the replica's. Of requests that come together the
    last would wait for the calls of those before it, so these are put off by what some dozens of requests take to read.

    Everything here happens on one event loop.
    """

    def __init__(self) -> None:
        self._latest_s = 0.0

    async def wait(self) -> None:
        """A request is on its way. Returns ``BEHIND_S`` later if no other was in the ``BURST_S`` before or comes
        meanwhile, ``BURST_S`` later if one was or does.
        """
        now = asyncio.get_running_loop().time()
        is_alone, self._latest_s = now - self._latest_s >= BURST_S, now
        await asyncio.sleep(BEHIND_S)
        if not is_alone or self._latest_s > now:
            await asyncio.sleep(BURST_S - BEHIND_S)
