"""The adapters that a gateway serves: those of the deployment, and those that come and go while replicas run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from shoal_cluster.serve.feed_messages import ADAPTERS
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.journal import EventKind
from shoal_cluster.serve.replica_adapters import VERSION_MARK, Told, Wanted
from shoal_replica.errors import ShoalError, Unavailable

POLL_S = 1.0


class ServedAdapters:
    """Asks each replica once a second to have what is wanted, and keeps what it says. While nothing is wanted and no
    replica has any, nobody is asked.

    Args:
        deployed: names that every replica has from its start.
    """

    def __init__(self, ledger: GatewayLedger, deployed: Sequence[str]) -> None:
        self._ledger = ledger
        self._deployed = tuple(deployed)
        self._wanted: dict[str, str] = {}
        self._told: dict[str, Told] = {}  # by replica
        self._failures: dict[str, str] = {}
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

    def version(self, name: str) -> str:
        """What replicas call an adapter: of one that comes and goes, the version that most of them have.

        Raises:
            Unavailable: no replica has loaded it yet.
        """
        if name in self._deployed:
            return name
        counts = Counter(v for told in self._told.values() for v in told.versions if _name(v) == name)
        if not counts:
            why = self._failures.get(name)
            raise Unavailable(f"adapter {name!r} is not loaded yet" + (f": {why}" if why else ""))
        return max(counts, key=lambda version: (counts[version], version))

    def lacking(self, version: str) -> frozenset[str]:
        """The replicas that do not have a version, as far as they have told."""
        if VERSION_MARK not in version:
            return frozenset()
        has = {replica_id for replica_id, told in self._told.items() if version in told.versions}
        return frozenset(self._ledger.view.replica_ids) - has

    async def run(self) -> None:
        """Keep asking, until cancelled."""
        while True:
            self._changed.clear()
            replica_ids = self._ledger.view.replica_ids
            if self._wanted or any(told.versions for told in self._told.values()):
                question = msgspec.msgpack.encode(Wanted(self._wanted))
                answers = await asyncio.gather(*(self._ask(replica_id, question) for replica_id in replica_ids))
                told = zip(replica_ids, answers, strict=True)
                self._told = {replica_id: answer for replica_id, answer in told if answer is not None}
                self._note_failures()
            else:
                self._told = {}
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _ask(self, replica_id: str, question: bytes) -> Told | None:
        """None if the replica is new, gone or busy; what it said before no longer counts."""
        try:
            return msgspec.msgpack.decode(await self._ledger.ask(replica_id, ADAPTERS, question), type=Told)
        except ShoalError:
            return None

    def _note_failures(self) -> None:
        failures = {name: why for told in self._told.values() for name, why in told.failures.items()}
        for name, why in failures.items():
            if self._failures.get(name) != why:
                self._ledger.journal.note(EventKind.CHANGED, f"adapter {name!r} cannot be loaded: {why}")
        self._failures = failures


def _name(version: str) -> str:
    return version.rpartition(VERSION_MARK)[0]
