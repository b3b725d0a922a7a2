"""What follows a request and can wait, out of the way of requests that come with it."""

from __future__ import annotations

import asyncio

BEHIND_S = 0.002
BURST_S = 0.05


class Lull:
    """Lets a burst be read before what follows each of its requests is done: whoever comes last waits for all of it.

    Everything here happens on one event loop.
    """

    def __init__(self) -> None:
        self._latest_s = 0.0

    async def after_this(self) -> None:
        """A request has come. Returns ``BEHIND_S`` after it if it came alone, ``BURST_S`` if another did within that
        time before it, or right behind it.
        """
        now = asyncio.get_running_loop().time()
        is_alone, self._latest_s = now - self._latest_s >= BURST_S, now
        await asyncio.sleep(BEHIND_S)
        if not is_alone or self._latest_s > now:
            await asyncio.sleep(BURST_S - BEHIND_S)
