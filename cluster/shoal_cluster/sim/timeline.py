"""The load of each replica over simulated time, for plots."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.sim.cluster import SimCluster


@dataclass(slots=True)
class Series:
    """Samples of one replica: time in s, share of the last interval spent in steps, share of blocks allocated, and
    requests waiting.
    """

    time_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)


class Timeline:
    """Samples ``cluster`` every ``interval_s`` until its last request has ended, without changing the run."""

    def __init__(self, cluster: SimCluster, interval_s: float) -> None:
        self.series: dict[str, Series] = {}
        self._cluster = cluster
        self._interval_s = interval_s
        self._last_busy_s: dict[str, float] = {}
        cluster.loop.after(interval_s, self._sample)

    def _sample(self) -> None:
        now = self._cluster.loop.now
        for replica_id, replica in self._cluster.replicas.items():
            stats = replica.scheduler.stats(now)
            series = self.series.setdefault(replica_id, Series())
            series.time_s.append(now)
            busy_s, before_s = replica.busy_so_far_s, self._last_busy_s.get(replica_id, 0.0)
            series.busy.append(min(1.0, max(0.0, busy_s - before_s) / self._interval_s))
            series.held.append(stats.utilization)
            series.num_waiting.append(stats.num_waiting)
            self._last_busy_s[replica_id] = busy_s
        if self._cluster.book.num_open:
            self._cluster.loop.after(self._interval_s, self._sample)
