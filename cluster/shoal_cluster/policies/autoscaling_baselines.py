"""Other ways to choose a replica count, for comparison: simplified from what their projects document.

Each takes the view, what it remembers, the bounds and the time, and returns the count and what to remember.
``per_replica`` is the number of requests that one replica should have, running and waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_observe import reporting
from shoal_cluster.policies.autoscaling_view import ScaleView

Scaling = Literal["shoal", "serve", "hpa", "kpa", "threshold"]
SCALINGS: tuple[Scaling, ...] = ("shoal", "serve", "hpa", "kpa", "threshold")

NEVER_FROM_ZERO: tuple[Scaling, ...] = ("hpa", "threshold")
"""Policies that go by what replicas report alone: where there is none, they never ask for one."""

SERVE_LOOK_BACK_S, SERVE_UP_S, SERVE_DOWN_S = 30.0, 30.0, 600.0
HPA_PERIOD_S, HPA_TOLERANCE, HPA_DOWN_S = 15.0, 0.1, 300.0
KPA_STABLE_S, KPA_PANIC_S, KPA_PANIC_RATIO, KPA_MAX_DOWN = 60.0, 6.0, 2.0, 2.0
THRESHOLD_PERIOD_S, THRESHOLD_UTILIZATION, THRESHOLD_QUEUE = 10.0, 0.8, 100


@dataclass(frozen=True, slots=True)
class Past:
    """What a baseline remembers: (time, value) samples, (time, count) wanted, and since when it has wanted to move."""

    samples: tuple[tuple[float, float], ...] = ()
    wishes: tuple[tuple[float, int], ...] = ()
    wants_up_since_s: float | None = None
    wants_down_since_s: float | None = None
    panic_s: float | None = None
    panic_peak: int = 0
    acted_s: float = -math.inf

    def seen(self, now: float, value: float, window_s: float) -> Past:
        """The same with one more sample; those older than ``window_s`` are forgotten."""
        return replace(self, samples=(*(s for s in self.samples if s[0] > now - window_s), (now, value)))

    def mean(self, now: float, window_s: float) -> float:
        values = [value for time_s, value in self.samples if time_s > now - window_s]
        return sum(values) / len(values) if values else 0.0


def num_ongoing(view: ScaleView) -> int:
    """Requests that run or wait at replicas, are on their way there, or are held at gateways."""
    rows = sum(row.num_reserved for row in view.replicas)
    held = view.demand.num_held if view.demand is not None else 0
    return rows + held + sum(s.num_running + s.num_waiting for s in reporting(view.replicas))


def serve_default(
    view: ScaleView, past: Past, config: ScaleConfig, now: float, per_replica: float = 2.0
) -> tuple[int, Past]:
    """Ray Serve 2.60's own: mean ongoing requests over the target; up after 30 s of wanting to, down after 600 s."""
    past = past.seen(now, num_ongoing(view), SERVE_LOOK_BACK_S)
    wanted = _bounded(math.ceil(past.mean(now, SERVE_LOOK_BACK_S) / per_replica), config)
    up_s = _since(past.wants_up_since_s, now) if wanted > view.num_target else None
    down_s = _since(past.wants_down_since_s, now) if wanted < view.num_target else None
    if (up_s is not None and now - up_s >= SERVE_UP_S) or (down_s is not None and now - down_s >= SERVE_DOWN_S):
        return wanted, replace(past, wants_up_since_s=None, wants_down_since_s=None)
    return view.num_target, replace(past, wants_up_since_s=up_s, wants_down_since_s=down_s)


def hpa(view: ScaleView, past: Past, config: ScaleConfig, now: float) -> tuple[int, Past]:
    """Kubernetes' Horizontal Pod Autoscaler on block utilization: every 15 s by the ratio to the target, unless that is
    within 10 %; up by 4 or to twice as many at most, whichever is more; down to the highest count wanted in 300 s.
    """
    known = reporting(view.replicas)
    past = past.seen(now, sum(s.utilization for s in known) / len(known) if known else 0.0, HPA_PERIOD_S)
    if now - past.acted_s < HPA_PERIOD_S or not known:
        return view.num_target, past
    ratio = past.mean(now, HPA_PERIOD_S) / config.target_utilization
    wanted = view.num_target if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(ratio * len(known))
    wanted = _bounded(min(wanted, max(view.num_target + 4, 2 * view.num_target)), config)
    wishes = (*(w for w in past.wishes if w[0] > now - HPA_DOWN_S), (now, wanted))
    count = wanted if wanted >= view.num_target else min(view.num_target, max(n for _, n in wishes))
    return count, replace(past, wishes=wishes, acted_s=now)


def kpa(view: ScaleView, past: Past, config: ScaleConfig, now: float, per_replica: float) -> tuple[int, Past]:
    """Knative's: mean requests of 60 s, and no further down than to half of what is ready. Once the mean of 6 s asks
    for twice what is ready it goes by that, and only up, until that has not been so for 60 s.
    """
    past = past.seen(now, num_ongoing(view), KPA_STABLE_S)
    ready = max(1, len(view.replicas))
    stable = math.ceil(past.mean(now, KPA_STABLE_S) / per_replica)
    panic = math.ceil(past.mean(now, KPA_PANIC_S) / per_replica)
    stable, panic = (max(n, math.floor(ready / KPA_MAX_DOWN)) for n in (stable, panic))
    if panic / ready >= KPA_PANIC_RATIO:
        past = replace(past, panic_s=now)
    if past.panic_s is None or now - past.panic_s > KPA_STABLE_S:
        return _bounded(stable, config), replace(past, panic_s=None, panic_peak=0)
    peak = max(panic, past.panic_peak, view.num_target)
    return _bounded(peak, config), replace(past, panic_peak=peak)


def threshold(view: ScaleView, past: Past, config: ScaleConfig, now: float) -> tuple[int, Past]:
    """Every 10 s: one more when over 80 % of blocks are used and more than 100 requests wait; one less under 40 %."""
    known = reporting(view.replicas)
    if now - past.acted_s < THRESHOLD_PERIOD_S or not known:
        return view.num_target, past
    past = replace(past, acted_s=now)
    used = sum(s.utilization for s in known) / len(known)
    if used > THRESHOLD_UTILIZATION and sum(s.num_waiting for s in known) > THRESHOLD_QUEUE:
        return _bounded(view.num_target + 1, config), past
    if used < THRESHOLD_UTILIZATION / 2:
        return _bounded(view.num_target - 1, config), past
    return view.num_target, past


def _since(since_s: float | None, now: float) -> float:
    return now if since_s is None else since_s


def _bounded(count: int, config: ScaleConfig) -> int:
    return min(max(count, config.min_replicas), config.max_replicas)
