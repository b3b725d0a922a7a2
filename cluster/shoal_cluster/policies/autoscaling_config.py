"""The autoscaler's settings: bounds, targets, delays and schedules. All of them may change while replicas run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from shoal_replica.errors import ConfigError, InvalidArgument

MAX_REPLICAS = 1000
MAX_SCHEDULE_S = 366 * 86_400
LIMITS: dict[str, tuple[float, float]] = {  # what may be tuned, and within which limits
    "min_replicas": (0, MAX_REPLICAS),
    "max_replicas": (1, MAX_REPLICAS),
    "target_utilization": (0.05, 1.0),
    "ttft_objective_s": (0.01, 3600.0),
    "burst_window_s": (1.0, 60.0),
    "downscale_delay_s": (0.0, 86400.0),
    "headroom": (0.0, 100.0),
    "burst_memory_s": (0.0, 86400.0),
}
COUNTS = ("min_replicas", "max_replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """At least ``min_replicas`` for ``duration_s`` from each time that ``cron`` names in ``timezone``.

    Raises:
        ConfigError: a value is not allowed, or ``cron`` names no time that comes.
    """

    cron: str
    duration_s: float
    min_replicas: int
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        try:
            next(CronSim(self.cron, datetime.fromtimestamp(0.0, ZoneInfo(self.timezone))))
        except (CronSimError, StopIteration):
            raise ConfigError(f"schedules: got cron {self.cron!r}; must be five fields of a date that comes") from None
        except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of zones, such as America
            raise ConfigError(f"schedules: got timezone {self.timezone!r}; must be a name such as UTC") from None
        if not 60 <= self.duration_s <= MAX_SCHEDULE_S:
            raise ConfigError(f"schedules: got duration_s {self.duration_s!r}; must be from 60 to {MAX_SCHEDULE_S}")
        if not (isinstance(self.min_replicas, int) and 0 < self.min_replicas <= MAX_REPLICAS):
            raise ConfigError(
                f"schedules: got min_replicas {self.min_replicas!r}; must be a whole number from 1 to {MAX_REPLICAS}"
            )

    def holds_at(self, time_s: float) -> bool:
        """Whether ``time_s`` (Unix time) is within ``duration_s`` after a time that ``cron`` names."""
        since = datetime.fromtimestamp(time_s - self.duration_s, ZoneInfo(self.timezone))
        return next(CronSim(self.cron, since)).timestamp() <= time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig:
    """Bounds, targets and delays.

    Attributes:
        min_replicas, max_replicas: the count is always within these; a minimum of 0 lets an idle cluster go.
        target_utilization: share of a replica's blocks, slots and compute that load may take, from 0.05 to 1.
        ttft_objective_s: longest wait for a first token that queues may predict before replicas are added for it.
        burst_window_s: a short window over which arrivals are averaged, too; a burst counts as far as it is certain.
        downscale_delay_s: how long fewer replicas must have been enough; three times as long where that saves less than
            a tenth. At 300 or more no count is returned to within five minutes of leaving it.
        headroom: replicas held ready for a jump that has not been seen yet: this many times the square root of the
            number that the load fills. 0: none.
        burst_memory_s: how long replicas are held ready for a peak that is over. 0: not at all.
        schedules: minimums by the clock.

    Raises:
        ConfigError: a value is outside its limits.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_utilization: float = 0.7
    ttft_objective_s: float = 2.0
    burst_window_s: float = 5.0
    downscale_delay_s: float = 300.0
    headroom: float = 5.0
    burst_memory_s: float = 3600.0
    schedules: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        for name in LIMITS:
            if (limit := _broken_limit(name, getattr(self, name))) is not None:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}; {limit}")
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas: got {self.min_replicas}; must be at most max_replicas ({self.max_replicas})"
            )

    def tuned(self, changes: Mapping[str, float]) -> ScaleConfig:
        """A copy with ``changes`` to fields that LIMITS names.

        Raises:
            InvalidArgument: a name or a value is not allowed.
        """
        for name, value in changes.items():
            if name not in LIMITS:
                raise InvalidArgument("setting", name, f"must be one of {', '.join(LIMITS)}")
            if (limit := _broken_limit(name, value)) is not None:
                raise InvalidArgument(name, value, limit)
        whole = {name: int(value) if name in COUNTS else value for name, value in changes.items()}
        low, high = whole.get("min_replicas", self.min_replicas), whole.get("max_replicas", self.max_replicas)
        if low > high:
            raise InvalidArgument("min_replicas", low, f"must be at most max_replicas ({high})")
        return replace(self, **whole)  # type: ignore[arg-type]

    def scheduled_replicas(self, time_s: float, ahead_s: float) -> int:
        """The highest minimum of the schedules that hold at ``time_s`` or ``ahead_s`` later; 0 when none does."""
        holding = (s for s in self.schedules if s.holds_at(time_s) or s.holds_at(time_s + ahead_s))
        return max((s.min_replicas for s in holding), default=0)


def tunable(config: ScaleConfig) -> dict[str, float]:
    """The values of the settings that may be tuned, by name."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name in LIMITS}


def _broken_limit(name: str, value: float) -> str | None:
    """What ``value`` must be, in words; None if it is."""
    low, high = LIMITS[name]
    if not low <= value <= high:  # NaN fails, too
        return f"must be from {low:g} to {high:g}"
    return "must be a whole number" if name in COUNTS and value != int(value) else None
