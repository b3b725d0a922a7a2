"""The adapters that a gateway serves: those of the deployment, and those that come and go while replicas run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from shoal_cluster.serve.adapter_demand import AdaptersTold, AdaptersWanted
from shoal_cluster.serve.feed_messages import ADAPTERS
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.journal import EventKind
from shoal_replica.adapter import VERSION_MARK
from shoal_replica.errors import ShoalError, Unavailable

POLL_S = 1.0
WAIT_S = 0.1


class ServedAdapters:
    """Asks each replica once a second to have what is wanted, and keeps what it says. Where nothing is wanted, it is
    asked until it has nothing.

    Args:
        deployed: names that every replica has from its start.
    """

    def __init__(self, ledger: GatewayLedger, deployed: Sequence[str]) -> None:
        self._ledger = ledger
        self._deployed = tuple(deployed)
        self._wanted: dict[str, str] = {}
        self._told: dict[str, AdaptersTold] = {}  # by replica, what it said last
        self._asked: dict[str, Mapping[str, str]] = {}  # the wish that it answered
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._current: dict[str, str] = {}  # by name, the version that most replicas have as theirs
        self._failures: dict[str, str] = {}
        self._in_use = Counter[str]()
        self._changed = asyncio.Event()

    def want(self, sources: Mapping[str, str]) -> None:
        """There should be these besides the deployed ones, by name, at folders or hub ids."""
        if sources != self._wanted:
            self._wanted = dict(sources)
            self._changed.set()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that calls may ask for."""
        return (*self._deployed, *self._wanted)

    def is_known(self, name: str) -> bool:
        """Whether replicas have an adapter from their start, or one has told that it has loaded it."""
        return name in self._deployed or name in self._current

    def check(self, name: str) -> None:
        """Raise Unavailable if a replica could not load an adapter and none has it, or if it is wanted no longer."""
        if not self.is_known(name) and (name in self._failures or name not in self._wanted):
            self.version(name)

    def version(self, name: str) -> str:
        """What replicas call an adapter.

        Raises:
            Unavailable: no replica has loaded it yet.
        """
        if name in self._deployed:
            return name
        if (version := self._current.get(name)) is None:
            why = self._failures.get(name)
            raise Unavailable(f"adapter {name!r} is not loaded yet" + (f": {why}" if why else ""))
        return version

    def num_replicas(self, name: str) -> int:
        """How many replicas have an adapter of that name; "" is the model alone."""
        version = name if not name or name in self._deployed else self._current.get(name)
        return 0 if version is None else len(self._ledger.view.replica_ids) - len(self.lacking(version))

    @contextmanager
    def using(self, version: str) -> Iterator[None]:
        """Meanwhile, replicas that have a version are asked to keep it."""
        if VERSION_MARK not in version:
            yield
            return
        self._in_use[version] += 1
        try:
            yield
        finally:
            self._in_use[version] -= 1
            if not self._in_use[version]:
                del self._in_use[version]

    def lacking(self, version: str) -> frozenset[str]:
        """The replicas that do not have a version, as far as they have told."""
        if VERSION_MARK not in version:
            return frozenset()
        told = self._told
        return frozenset(r for r in self._ledger.view.replica_ids if r not in told or version not in told[r].versions)

    async def until_somewhere(self, version: str, timeout_s: float) -> None:
        """Return once some replica has a version, or there is none that could have it, or after ``timeout_s``."""
        if VERSION_MARK not in version:
            return
        deadline = asyncio.get_running_loop().time() + timeout_s
        while 0 < len(self._ledger.view.replica_ids) <= len(self.lacking(version)):
            if asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(WAIT_S)

    async def run(self) -> None:
        """Keep asking, until cancelled."""
        try:
            while True:
                self._changed.clear()
                self._ask_all()
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._asking.values():
                task.cancel()

    def _ask_all(self) -> None:
        """Ask those that have answered the last time, so that one that is silent holds up no other."""
        replica_ids = set(self._ledger.view.replica_ids)
        for gone in self._told.keys() - replica_ids:
            del self._told[gone]
            self._asked.pop(gone, None)
        self._gather()
        for replica_id in replica_ids - self._asking.keys():
            told = self._told.get(replica_id)
            is_settled = self._asked.get(replica_id) == {} and told is not None and not (told.versions or told.failures)
            if self._wanted or self._in_use or not is_settled:
                task = asyncio.get_running_loop().create_task(self._ask(replica_id), name="shoal-ask-adapters")
                self._asking[replica_id] = task
                task.add_done_callback(partial(self._note_answer, replica_id))

    def _note_answer(self, replica_id: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(replica_id, None)

    async def _ask(self, replica_id: str) -> None:
        """What a replica that does not answer has said before still counts: if it is wrong, it refuses a request."""
        wanted = self._wanted
        question = msgspec.msgpack.encode(AdaptersWanted(self._ledger.gateway_id, dict(wanted), sorted(self._in_use)))
        try:
            answer = await self._ledger.ask(replica_id, ADAPTERS, question)
        except ShoalError:
            return
        self._told[replica_id], self._asked[replica_id] = msgspec.msgpack.decode(answer, type=AdaptersTold), wanted
        self._gather()

    def _gather(self) -> None:
        """What all replicas together have told."""
        counts: dict[str, Counter[str]] = {}
        for told in self._told.values():
            for name, version in told.current.items():
                counts.setdefault(name, Counter())[version] += 1
        self._current = {
            name: max(of, key=lambda version, of=of: (of[version], version))  # type: ignore[misc]
            for name, of in counts.items()
            if name in self._wanted
        }
        failures = {name: why for told in self._told.values() for name, why in told.failures.items()}
        for name, why in failures.items():
            if self._failures.get(name) != why:
                self._ledger.journal.note(EventKind.CHANGED, f"adapter {name!r} cannot be loaded: {why}")
        self._failures = failures
