"""What gateways ask of a replica's adapters, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

FORGET_S = 60.0
"""What a gateway asked for counts no longer if it has not been repeated for so long, and another one asks for some."""


class AdaptersWanted(msgspec.Struct, frozen=True):
    """A gateway's question.

    Attributes:
        sources: the adapters that there should be, by name, at these folders or hub ids.
        in_use: versions that its calls need, wanted or not.
    """

    gateway_id: str
    sources: dict[str, str]
    in_use: list[str] = []


class AdaptersTold(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        current: the version that new requests should ask for, by name.
        versions: all versions that requests may ask for.
        failures: why others cannot be had, by name.
    """

    current: dict[str, str] = {}
    versions: list[str] = []
    failures: dict[str, str] = {}


class AdapterDemand:
    """What all gateways ask for, which Serve changes one after the other: for a while they may differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_gateway: dict[str, tuple[AdaptersWanted, float]] = {}  # who has changed last comes last

    def take(self, wanted: AdaptersWanted) -> bool:
        """Note what a gateway asks for. Returns whether it is something else than before."""
        before, _ = self._by_gateway.get(wanted.gateway_id, (None, 0.0))
        if before is None or before.sources != wanted.sources:
            self._by_gateway.pop(wanted.gateway_id, None)
        self._by_gateway[wanted.gateway_id] = wanted, self._clock()
        return before != wanted

    def sources(self) -> Mapping[str, str]:
        """What all of them together want; of two sources of a name, the newer one."""
        self._forget()
        return {name: source for wanted, _ in self._by_gateway.values() for name, source in wanted.sources.items()}

    def in_use(self) -> set[str]:
        """Versions that somebody's calls need."""
        self._forget()
        return {version for wanted, _ in self._by_gateway.values() for version in wanted.in_use}

    def _forget(self) -> None:
        old = [name for name, (_, at) in self._by_gateway.items() if self._clock() - at > FORGET_S]
        if len(old) < len(self._by_gateway):
            for name in old:
                del self._by_gateway[name]
