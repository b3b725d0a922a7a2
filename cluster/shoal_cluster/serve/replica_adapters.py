"""The adapters of one replica that come and go while it runs, as gateways ask for them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal_cluster.serve.logs import fields
from shoal_replica.adapter import WEIGHTS_FILE, AdapterConfig, adapter_bytes
from shoal_replica.adapter_folder import CONFIG_FILE
from shoal_replica.build import find_adapters
from shoal_replica.config import DTYPE_BYTES, EngineConfig
from shoal_replica.engine import Engine
from shoal_replica.errors import ConfigError, ShoalError
from shoal_replica.memory import available_bytes

GRACE_S = 10.0
"""An adapter that nobody wants any more stays so long: gateways hear of it one after the other."""

VERSION_MARK = "@"
"""Between an adapter's name and the digest of its files: no name has it. What is cached belongs to a version."""

logger = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """A gateway's question: the adapters that there should be, by name, at these folders or hub ids."""

    sources: dict[str, str]


class Told(msgspec.Struct, frozen=True):
    """The answer: the versions that requests may ask for, and why others cannot be had, by name."""

    versions: list[str]
    failures: dict[str, str]


class ReplicaAdapters:
    """Loads what is wanted, and later frees what no longer is. Must be closed."""

    def __init__(self, engine: Engine, config: EngineConfig, grace_s: float = GRACE_S) -> None:
        self._engine = engine
        self._config = config
        self._grace_s = grace_s
        self._wanted: dict[str, str] = {}
        self._current: dict[str, str] = {}  # the version of each name that is wanted and loaded
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}
        self._work: asyncio.Task[None] | None = None

    def answer(self, question: bytes) -> bytes:
        """Take note of what is wanted, and tell what there is."""
        wanted = msgspec.msgpack.decode(question, type=Wanted).sources
        if wanted != self._wanted:
            self._wanted = wanted
            if self._work is None or self._work.done():
                self._work = asyncio.get_running_loop().create_task(self._follow(), name="shoal-adapters")
        versions = sorted(name for name in self._engine.adapters.names if VERSION_MARK in name)
        return msgspec.msgpack.encode(Told(versions, self._failures))

    async def close(self) -> None:
        """End what is under way; what is loaded stays."""
        tasks = [*self._leaving.values(), *([] if self._work is None else [self._work])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        """Bring about what is wanted, until that no longer changes."""
        done: Mapping[str, str] | None = None
        while done != self._wanted:
            done = wanted = self._wanted
            failures: dict[str, str] = {}
            for name, source in wanted.items():
                try:
                    await self._have(name, source)
                except ShoalError as error:
                    failures[name] = str(error)
                    logger.warning("an adapter cannot be loaded", extra=fields(adapter=name, error=str(error)))
            self._failures = failures
            kept = {name: version for name, version in self._current.items() if name in wanted}
            for version in set(self._current.values()) - set(kept.values()):
                self._leave(version)
            self._current = kept

    async def _have(self, name: str, source: str) -> None:
        """Load the adapter, if this version of it is not loaded."""
        adapter = await asyncio.to_thread(self._find, name, source)
        before, version = self._current.get(name), adapter.name
        if (task := self._leaving.pop(version, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if version not in self._engine.adapters.names:
            await self._engine.adapters.load(adapter)
            logger.info("an adapter is loaded", extra=fields(adapter=version))
        self._current[name] = version
        if before is not None and before != version:
            self._leave(before)

    def _find(self, name: str, source: str) -> AdapterConfig:
        """The adapter, under the name of its version. Raises ShoalError."""
        (adapter,) = find_adapters({name: source}, self._config.model)
        num_bytes = adapter_bytes((adapter,), DTYPE_BYTES[self._config.model.dtype])
        if self._config.parallel.device == "cpu" and num_bytes > (free := available_bytes()):
            raise ConfigError(f"adapters.{name}: takes {num_bytes} bytes of memory, of which {free} are free")
        return replace(adapter, name=f"{name}{VERSION_MARK}{_digest(Path(adapter.folder))}")

    def _leave(self, version: str) -> None:
        if version not in self._leaving:
            task = asyncio.get_running_loop().create_task(self._free(version), name="shoal-adapter-leaves")
            self._leaving[version] = task

    async def _free(self, version: str) -> None:
        await asyncio.sleep(self._grace_s)
        try:
            await self._engine.adapters.unload(version)
        except ShoalError as error:  # the engine has failed, and the replica is about to end
            logger.warning("an adapter cannot be freed", extra=fields(adapter=version, error=str(error)))
        else:
            logger.info("an adapter is freed", extra=fields(adapter=version))
        if self._leaving.get(version) is asyncio.current_task():
            del self._leaving[version]


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / file).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]
