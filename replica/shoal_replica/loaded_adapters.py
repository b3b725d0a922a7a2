"""The LoRA adapters that an engine's requests may ask for, while they come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from shoal_replica.adapter import AdapterConfig
from shoal_replica.executor import Executor
from shoal_replica.step_thread import StepThread


class LoadedAdapters:
    """Owned by an engine, whose steps wait while an adapter is loaded or freed.

    Attributes:
        names: those that requests may ask for now.
    """

    def __init__(self, names: set[str], executor: Executor, thread: StepThread) -> None:
        self.names = names
        self._executor = executor
        self._thread = thread
        self._num_used = Counter[str]()
        self._freed = asyncio.Event()

    def use(self, name: str, until: asyncio.Future[None]) -> None:
        """A request uses it until that future is done."""
        self._num_used[name] += 1
        until.add_done_callback(lambda _: self._release(name))

    async def load(self, adapter: AdapterConfig) -> None:
        """Let requests ask for an adapter. Raises ConfigError, and EngineDead."""
        await self._thread.run(partial(self._executor.load, adapter))
        self.names.add(adapter.name)

    async def unload(self, name: str) -> None:
        """Take no more requests for an adapter, and free it when those there are have ended. Cancelled before that, it
        stays. Raises EngineDead.
        """
        self.names.discard(name)
        try:
            await self._unused(name)
        except asyncio.CancelledError:
            self.names.add(name)
            raise
        unloading = asyncio.ensure_future(self._thread.run(partial(self._executor.unload, name)))
        try:
            await asyncio.shield(unloading)
        finally:
            await asyncio.wait([unloading])

    async def _unused(self, name: str) -> None:
        while self._num_used[name]:
            self._freed.clear()
            await self._freed.wait()

    def _release(self, name: str) -> None:
        self._num_used[name] -= 1
        self._freed.set()
