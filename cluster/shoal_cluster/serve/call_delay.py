"""How long Serve's calls are delayed behind their requests."""

from __future__ import annotations

import asyncio

BEHIND_S = 0.002
BURST_S = 0.05


class CallDelay:
    """A call takes some milliseconds of both the gateway's and the replica's event loop. When requests come together,
    the last would wait for the calls of those before it, so the calls are delayed by about as long as some dozens of
    requests take to read.

    Everything here happens on one event loop.
    """

    def __init__(self) -> None:
        self._latest_s = 0.0

    async def wait(self) -> None:
        """A request has been sent: wait before making its call. Waits ``BEHIND_S`` if no other request was sent in the
        ``BURST_S`` before or is sent meanwhile, else ``BURST_S``.
        """
        now = asyncio.get_running_loop().time()
        is_alone, self._latest_s = now - self._latest_s >= BURST_S, now
        await asyncio.sleep(BEHIND_S)
        if not is_alone or self._latest_s > now:
            await asyncio.sleep(BURST_S - BEHIND_S)
