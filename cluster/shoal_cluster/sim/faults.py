"""What fails in a run, of which replica and when."""

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
    """Of a replica, from a time on until another. Raises ValueError for times that are none."""

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
    """Steps that the replica begins from ``from_s`` on do not end before ``until_s``."""


@dataclass(frozen=True, slots=True)
class Slow(Fault):
    """Steps that the replica begins meanwhile take ``factor`` times as long."""

    factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Crash(Fault):
    """The replica's process ends at ``from_s``, and with it what it computes and all that it has cached, unless all
    share one pool.

    Gateways know when its feed breaks off, and let its requests go on elsewhere. Another replica, of another id, serves
    in its place from ``until_s`` on, with nothing cached; with autoscaling that is the scaler's matter.
    """


class Hindrances:
    """What keeps one replica's steps from ending when they should."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._stalls = [fault for fault in faults if isinstance(fault, Stall)]
        self._slows = [fault for fault in faults if isinstance(fault, Slow)]
        self._changes_s = sorted({stall.from_s for stall in self._stalls} | {t for s in self._slows for t in _times(s)})

    def stalled_s(self, now: float) -> float:
        """How long a step takes at least that begins now."""
        return max((stall.until_s - now for stall in self._stalls if stall.from_s <= now), default=0.0)

    def factor(self, now: float) -> float:
        """How many times as long it takes as it should."""
        return math.prod(slow.factor for slow in self._slows if slow.from_s <= now < slow.until_s)

    def next_s(self, now: float) -> float:
        """When that will be otherwise, unless a stall ends before."""
        return next((time_s for time_s in self._changes_s if time_s > now), math.inf)


def replica_name(number: int) -> str:
    """The id of the replica that was the ``number``-th to start, from 0 on."""
    return f"replica-{number:04d}"


def parse_faults(texts: Sequence[str], num_replicas: int) -> tuple[Fault, ...]:
    """Faults as they are written: ``crash:3@600+30`` is of replica 3, from second 600 on for 30 seconds.

    Raises:
        ConfigError: one is no fault, of no replica that there is at first, or of one that has crashed.
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
