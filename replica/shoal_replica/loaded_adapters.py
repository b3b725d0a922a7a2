"""The LoRA adapters that an engine's requests may ask for, while they come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from shoal_replica.adapter import AdapterConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.executor import Executor
from shoal_replica.step_thread import StepThread


class LoadedAdapters:
    """Owned by an engine, whose steps wait while an adapter is loaded or freed.

    Attributes:
        names: those that requests may ask for now.
    """

    def __init__(self, names: set[str], executor: Executor, thread: StepThread) -> None:
        self.names = names
        self._held = set(names)  # by the executor
        self._executor = executor
        self._thread = thread
        self._num_used = Counter[str]()
        self._freed = asyncio.Event()

    def use(self, name: str, until: asyncio.Future[None]) -> None:
        """A request uses it until that future is done."""
        self._num_used[name] += 1
        until.add_done_callback(lambda _: self._release(name))

    async def load(self, adapter: AdapterConfig) -> None:
        """Let requests ask for an adapter. Raises ConfigError, also where the name is taken, and EngineDead."""
        if adapter.name in self._held:
            raise ConfigError(f"adapters.{adapter.title}: is already loaded")
        self._held.add(adapter.name)
        try:
            await self._thread.run(partial(self._executor.load_adapter, adapter), lambda: self.names.add(adapter.name))
        except BaseException:
            if adapter.name not in self.names:  # else the executor has it, though nobody has waited for that
                self._held.discard(adapter.name)
            raise

    async def unload(self, name: str) -> None:
        """Take no more requests for an adapter, and free it when those there are have ended. Cancelled before that, it
        stays. Raises NotFound, and EngineDead.
        """
        if name not in self.names:
            raise NotFound(f"adapter: {name!r} is not loaded")
        self.names.discard(name)
        try:
            while self._num_used[name]:
                self._freed.clear()
                await self._freed.wait()
        except asyncio.CancelledError:
            self.names.add(name)
            raise
        await self._thread.run(partial(self._executor.unload_adapter, name), lambda: self._held.discard(name))

    def _release(self, name: str) -> None:
        self._num_used[name] -= 1
        if not self._num_used[name]:
            del self._num_used[name]
        self._freed.set()
