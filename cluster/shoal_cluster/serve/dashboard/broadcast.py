"""One producer for any number of viewers: it starts with the first and stops with the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable


class Broadcast:
    """Calls ``produce`` every ``period_s`` seconds while there are viewers. A slow viewer misses events."""

    def __init__(self, produce: Callable[[], bytes], period_s: float) -> None:
        self._produce = produce
        self._period_s = period_s
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: bytes | None = None
        self._next: asyncio.Future[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the newest event at once, then each new one. Raises the producer's error if it fails."""
        self._num_viewers += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-dashboard")
            elif self._latest is not None:
                yield self._latest
            while True:
                yield await self._news(self._task)
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = self._latest = None

    async def _news(self, task: asyncio.Task[None]) -> bytes:
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        news = self._next
        await asyncio.wait((news, task), return_when=asyncio.FIRST_COMPLETED)
        if not news.done():
            task.result()
        return await news

    async def _run(self) -> None:
        while True:
            self._latest = self._produce()
            if self._next is not None and not self._next.done():
                self._next.set_result(self._latest)
            await asyncio.sleep(self._period_s)
