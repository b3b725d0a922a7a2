"""How much longer each replica takes for a prompt than the fastest: their machines differ, or something hinders one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import ReplicaStats

WINDOW_S = 60.0
"""A pace is the fastest of the last one to two of these. Long contexts and few prompts to a step make a replica seem
slow for a while; its fastest steps tell of the machine. Of like replicas in replays of traces one is then 1.2 times as
slow as the median at most."""

MIN_REPORTS = 16
"""Before that many a pace may be that of first steps, which take longer."""

LOOK_S = 1.0
STEPS = 2  # of slowness in a doubling
HOLD = 0.7  # steps by which it must differ from what it was to become another


@dataclass(slots=True)
class _Fastest:
    """The least of the last one to two windows."""

    since_s: float
    num_reports: int = 0
    now: float = math.inf
    before: float = math.inf

    def take(self, token_s: float, now: float) -> None:
        if now - self.since_s > WINDOW_S:
            self.since_s, self.before, self.now = now, self.now, math.inf
        self.now = min(self.now, token_s)
        self.num_reports += 1

    @property
    def token_s(self) -> float:
        return min(self.now, self.before)


class Slowness:
    """How slow replicas are as one gateway sees it; its owner, and the only one who tells ``view`` so.

    In coarse steps that are kept until it is clearly another: between like replicas it makes no difference.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._fastest: dict[str, _Fastest] = {}
        self._steps: dict[str, int] = {}  # from the median
        self._looked_s = -math.inf

    def hear(self, replica_id: str, stats: ReplicaStats | None, now: float) -> None:
        """A replica's news. It may be called at all of them, and looks now and then."""
        if stats is not None and stats.token_s > 0 and stats.num_running:
            fastest = self._fastest.get(replica_id)
            if fastest is None:
                fastest = self._fastest[replica_id] = _Fastest(now)
            fastest.take(stats.token_s, now)
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._look()

    def _look(self) -> None:
        ids = self._view.replica_ids
        self._fastest = {replica_id: self._fastest[replica_id] for replica_id in ids if replica_id in self._fastest}
        known = {r: one.token_s for r, one in self._fastest.items() if one.num_reports >= MIN_REPORTS}
        self._steps = steps_from_median(known, self._steps)
        least = min(self._steps.values(), default=0)
        for replica_id in ids:
            step = self._steps.get(replica_id, least) - least
            self._view.set_slowness(replica_id, round(2 ** (step / STEPS), 2))


def steps_from_median(token_s: Mapping[str, float], before: Mapping[str, int]) -> dict[str, int]:
    """How many steps of slowness each replica is above the median, as it was ``before`` unless that is off by more than
    ``HOLD``.
    """
    if not token_s:
        return {}
    middle = median(token_s.values())
    steps = {}
    for replica_id, its_token_s in token_s.items():
        exact, was = STEPS * math.log2(its_token_s / middle), before.get(replica_id, 0)
        steps[replica_id] = was if abs(exact - was) <= HOLD else round(exact)
    return steps
