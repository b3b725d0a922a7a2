"""The adapters of one replica that come and go while it runs, as gateways ask for them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from shoal_cluster.serve.adapter_demand import AdapterDemand, AdaptersTold, AdaptersWanted
from shoal_cluster.serve.logs import error_fields, fields
from shoal_replica.adapter import VERSION_MARK, WEIGHTS_FILE, AdapterConfig, adapter_bytes, title
from shoal_replica.adapter_folder import CONFIG_FILE
from shoal_replica.build import find_adapters
from shoal_replica.config import EngineConfig
from shoal_replica.engine import Engine
from shoal_replica.errors import ConfigError, ShoalError
from shoal_replica.memory import available_bytes
from shoal_replica.model_config import DTYPE_BYTES

LOOK_S = 2.0
"""How often files are looked at for changes; after failures, the first pause before another try."""

GRACE_S = 10.0
"""A version that is no longer current stays so long: gateways hear of it one after the other."""

MAX_RETRY_S = 60.0
CLOSE_S = 5.0
FILES = (CONFIG_FILE, WEIGHTS_FILE)

Stamp = tuple[tuple[int, int], ...]
"""Size and time of change of an adapter's files."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The version of a name that new requests should ask for, and what it was made of."""

    version: str
    source: str
    folder: Path
    stamp: Stamp


class ReplicaAdapters:
    """Loads what is wanted, and later frees what no longer is. Must be started, and closed.

    Args:
        look_s: seconds between looks.
        clock: seconds, read once at each look; it tells when a version's grace is over, and a pause after failures.
    """

    def __init__(
        self, engine: Engine, config: EngineConfig, look_s: float = LOOK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._config = config
        self._look_s = look_s
        self._clock = clock
        self._demand = AdapterDemand()
        self._current: dict[str, _Loaded] = {}
        self._unproven: set[str] = set()  # versions whose files may have changed while they were read
        self._idle_since_s: dict[str, float] = {}  # of versions that are not current
        self._failures: dict[str, str] = {}
        self._retry: dict[tuple[str, str], tuple[float, float]] = {}  # name and source: when, and the pause after that
        self._loading: dict[str, asyncio.Task[None]] = {}  # by name
        self._leaving: dict[str, asyncio.Task[None]] = {}  # by version
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-adapters")

    def answer(self, question: bytes) -> bytes:
        """Take note of what a gateway wants, and tell what there is."""
        if self._demand.take(msgspec.msgpack.decode(question, type=AdaptersWanted)):
            self._news.set()
        current = {name: loaded.version for name, loaded in self._current.items()}
        return msgspec.msgpack.encode(AdaptersTold(current, sorted(self._versions()), self._failures))

    async def close(self) -> None:
        """End what is under way; what is loaded stays."""
        tasks = [task for task in (self._task, *self._loading.values(), *self._leaving.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def _versions(self) -> set[str]:
        return {name for name in self._engine.adapters.names if VERSION_MARK in name} - self._unproven

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._tend()
            except Exception as error:  # whatever it is, the next look may fare better
                logger.error("adapters cannot be looked at", extra=fields(**error_fields(error)))
            is_settled = not (self._current or self._failures or self._loading or self._idle_since_s or self._leaving)
            try:
                async with asyncio.timeout(None if is_settled else self._look_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _tend(self) -> None:
        """Begin to load what is wanted and not current, and to free what has not been for long."""
        sources = self._demand.sources()
        now = self._clock()
        self._failures = {name: why for name, why in self._failures.items() if name in sources}
        self._retry = {of: at for of, at in self._retry.items() if of in sources.items()}
        for name in [*self._current]:
            if name not in sources:
                del self._current[name]
        for name, source in sources.items():
            is_due = (name, source) not in self._retry or now >= self._retry[name, source][0]
            if is_due and name not in self._loading and not await self._is_current(name, source):
                task = asyncio.get_running_loop().create_task(self._load(name, source), name="shoal-adapter-comes")
                self._loading[name] = task
        kept = {loaded.version for loaded in self._current.values()} | self._demand.in_use()
        self._idle_since_s = {v: self._idle_since_s.get(v, now) for v in self._versions() - kept}
        for version, since_s in self._idle_since_s.items():
            if now - since_s >= GRACE_S and version not in self._leaving:
                task = asyncio.get_running_loop().create_task(self._free(version), name="shoal-adapter-leaves")
                self._leaving[version] = task
                task.add_done_callback(partial(self._note_freed, version))
        for version in kept & self._leaving.keys():  # wanted again
            self._leaving[version].cancel()

    async def _is_current(self, name: str, source: str) -> bool:
        loaded = self._current.get(name)
        if loaded is None or loaded.source != source:
            return False
        return await asyncio.to_thread(_stamp, loaded.folder) in (loaded.stamp, ())  # files that are gone: it stays

    async def _load(self, name: str, source: str) -> None:
        try:
            self._current[name] = await self._have(name, source)
            self._failures.pop(name, None)
            self._retry.pop((name, source), None)
        except Exception as error:  # of whatever kind: the others are to go on
            told = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
            if self._failures.get(name) != told:
                logger.warning("an adapter cannot be loaded", extra=fields(adapter=name, error=told))
            self._failures[name] = told
            _, pause_s = self._retry.get((name, source), (0.0, LOOK_S))
            self._retry[name, source] = self._clock() + pause_s, min(2 * pause_s, MAX_RETRY_S)
        finally:
            self._loading.pop(name, None)
            if name not in self._failures:
                self._news.set()

    async def _have(self, name: str, source: str) -> _Loaded:
        """Load the adapter, if this version of it is not loaded. Raises what goes wrong."""
        adapter, folder, stamp = await asyncio.to_thread(self._find, name, source)
        version = adapter.name
        if (leaving := self._leaving.get(version)) is not None:
            leaving.cancel()
            await asyncio.wait([leaving])
        if version in self._unproven & self._engine.adapters.names:  # a try that was broken off
            await self._engine.adapters.unload(version)
        if version not in self._engine.adapters.names:
            await asyncio.to_thread(self._check_memory, adapter)
            self._unproven.add(version)
            await self._engine.adapters.load(adapter)
            if await asyncio.to_thread(_stamp, folder) != stamp:  # it may be of both versions, and is never told
                await self._engine.adapters.unload(version)
                raise ConfigError(f"adapters.{name}: its files have changed while they were read")
            self._unproven.discard(version)
            logger.info("an adapter is loaded", extra=fields(adapter=version))
        return _Loaded(version, source, folder, stamp)

    def _find(self, name: str, source: str) -> tuple[AdapterConfig, Path, Stamp]:
        """The adapter under the name of its version, where it is, and of when."""
        (adapter,) = find_adapters({name: source}, self._config.model)
        folder = Path(adapter.folder)
        stamp = _stamp(folder)
        return replace(adapter, name=f"{name}{VERSION_MARK}{_digest(folder)}"), folder, stamp

    def _check_memory(self, adapter: AdapterConfig) -> None:
        num_bytes = (Path(adapter.folder) / WEIGHTS_FILE).stat().st_size  # a copy, while it is read
        if self._config.parallel.device == "cpu":
            num_bytes += adapter_bytes((adapter,), DTYPE_BYTES[self._config.model.dtype])
        num_bytes *= self._config.parallel.num_ranks
        if num_bytes > available_bytes():
            raise ConfigError(f"adapters.{adapter.title}: takes {num_bytes} bytes, more memory than is free")

    async def _free(self, version: str) -> None:
        try:
            await self._engine.adapters.unload(version)
            logger.info("an adapter is freed", extra=fields(adapter=version))
        except ShoalError as error:  # the engine has failed, and the replica is about to end
            logger.warning("an adapter cannot be freed", extra=fields(adapter=title(version), error=str(error)))

    def _note_freed(self, version: str, _: asyncio.Task[None]) -> None:
        """It is over, even if it was cancelled before it began."""
        self._leaving.pop(version, None)
        self._idle_since_s.pop(version, None)


def _stamp(folder: Path) -> Stamp:
    """Empty if a file is missing."""
    try:
        stats = [(folder / file).stat() for file in FILES]
    except OSError:
        return ()
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


def _digest(folder: Path) -> str:
    """Of the files' contents: the same on all nodes, whenever they got them."""
    digest = hashlib.sha256()
    for file in FILES:
        with (folder / file).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]
