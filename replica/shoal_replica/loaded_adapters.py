"""The LoRA adapters that an engine's requests may ask for, while they come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Final

from shoal_replica.adapter import AdapterConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.executor import Executor
from shoal_replica.step_thread import StepThread

END: Final = object()


class LoadedAdapters:
    """Owned by an engine, whose steps run between the parts of an adapter that is loaded.

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
        parts, is_whole = self._executor.load_adapter(adapter), False

        def load_part() -> None:
            nonlocal is_whole
            is_whole = next(parts, END) is END

        try:
            while not is_whole:
                await self._thread.run(load_part)
        finally:
            if is_whole:  # even if nobody has waited for that
                self.names.add(adapter.name)
            else:
                with suppress(RuntimeError):  # the engine has stopped: all that its executor has goes
                    await self._thread.run(parts.close)
                self._held.discard(adapter.name)

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
