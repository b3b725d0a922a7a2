"""Faults injected into a run: which replica fails, how and when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cluster.sim.workload import MAX_ARRIVAL_S
from shoal_replica.errors import ConfigError

MAX_FAULT_S = 86_400.0
MAX_FACTOR = 100.0

_TIMES = r":(?P<number>\d{1,6})@(?P<from_s>\d+(\.\d+)?)\+(?P<for_s>\d+(\.\d+)?)"
_FAULT = re.compile(rf"(?P<kind>crash|stall){_TIMES}|slow{_TIMES.replace('P<', 'P<slow_')}x(?P<factor>\d+(\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one replica from ``from_s`` until ``until_s``.

    Raises:
        ValueError: a time is not finite, is negative, or the fault ends before it begins.
    """

    replica_id: str
    from_s: float
    until_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < math.inf:
            raise ValueError(f"from_s: got {self.from_s!r}; must be finite and not below 0")
        if not self.from_s <= self.until_s < math.inf:
            raise ValueError(f"until_s: got {self.until_s!r}; must be finite and not before from_s, {self.from_s!r}")


@dataclass(frozen=True, slots=True)
class Stall(Fault):
    """Steps that begin at or after ``from_s`` do not end before ``until_s``."""


@dataclass(frozen=True, slots=True)
class Slow(Fault):
    """Steps that begin in this time take ``factor`` times as long."""

    factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Crash(Fault):
    """The replica's process dies at ``from_s``. Its running step is lost, and its cache too, unless the replicas share
    one pool.

    The gateways notice when its feed breaks off, and resume its requests elsewhere. A replica with a new id and nothing
    cached takes its place at ``until_s``; under autoscaling, replacing it is up to the scaler.
    """


class Hindrances:
    """The stalls and slowdowns of one replica."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._stalls = [fault for fault in faults if isinstance(fault, Stall)]
        self._slows = [fault for fault in faults if isinstance(fault, Slow)]
        self._changes_s = sorted({stall.from_s for stall in self._stalls} | {t for s in self._slows for t in _times(s)})

    def stalled_s(self, now: float) -> float:
        """Minimum duration of a step that begins now."""
        return max((stall.until_s - now for stall in self._stalls if stall.from_s <= now), default=0.0)

    def factor(self, now: float) -> float:
        """By how much a step that begins now is slowed down; 1 is normal."""
        return math.prod(slow.factor for slow in self._slows if slow.from_s <= now < slow.until_s)

    def next_s(self, now: float) -> float:
        """When ``factor`` may change next or a stall begins; the end of a stall is not counted."""
        return next((time_s for time_s in self._changes_s if time_s > now), math.inf)


def replica_name(number: int) -> str:
    """The id of the replica that started as number ``number``, counted from 0."""
    return f"replica-{number:04d}"


def parse_faults(texts: Sequence[str], num_replicas: int) -> tuple[Fault, ...]:
    """Parse faults such as ``crash:3@600+30``: replica 3, from second 600, for 30 seconds.

    Raises:
        ConfigError: a text is not a fault, names a replica that does not exist at the start, or one that has crashed
            before the fault ends.
    """
    faults = tuple(_fault(text, num_replicas) for text in texts)
    latest_first = sorted(faults, key=lambda fault: -fault.from_s)
    crashes = {fault.replica_id: fault for fault in latest_first if isinstance(fault, Crash)}
    for text, fault in zip(texts, faults, strict=True):
        crash = crashes.get(fault.replica_id, fault)
        if fault is not crash and fault.until_s > crash.from_s:
            raise ConfigError(
                f"fault: got {text!r} of a replica that crashes at {crash.from_s:g} s; must end before that"
            )
    return faults


def _fault(text: str, num_replicas: int) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ConfigError(f"fault: got {text!r}; must be such as crash:3@600+30, stall:3@600+5 or slow:3@600+300x2")
    kind, prefix = found["kind"], "" if found["kind"] else "slow_"
    number, from_s, for_s = (found[prefix + name] for name in ("number", "from_s", "for_s"))
    if int(number) >= num_replicas:
        raise ConfigError(f"fault: got replica {int(number)} in {text!r}; must be below {num_replicas}")
    if not 0 < float(for_s) <= MAX_FAULT_S:
        raise ConfigError(f"fault: got {for_s} s in {text!r}; must be above 0 and at most {MAX_FAULT_S:.0f}")
    if not float(from_s) <= MAX_ARRIVAL_S:
        raise ConfigError(f"fault: got one from {from_s} s in {text!r}; must be at most {MAX_ARRIVAL_S:.0f}")
    times = replica_name(int(number)), float(from_s), float(from_s) + float(for_s)
    if kind is not None:
        return Crash(*times) if kind == "crash" else Stall(*times)
    if not 1 <= float(found["factor"]) <= MAX_FACTOR:
        raise ConfigError(f"fault: got {found['factor']} times in {text!r}; must be 1 to {MAX_FACTOR:.0f}")
    return Slow(*times, float(found["factor"]))


def _times(fault: Fault) -> tuple[float, float]:
    return fault.from_s, fault.until_s
