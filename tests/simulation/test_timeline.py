"""The load of replicas over time, as it is plotted."""

from __future__ import annotations

import pytest

from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.faults import Stall
from shoal_cluster.sim.run import run
from shoal_cluster.sim.timeline import Timeline
from shoal_cluster.sim.workload import poisson
from shoal_replica.config import CacheConfig

STALL = Stall("replica-0000", 5.0, 65.0)


@pytest.mark.parametrize("interval_s", [0.01, 1.0, 10.0])
def test_a_long_step_is_spread_over_the_time_that_it_takes(interval_s: float) -> None:
    requests = poisson(requests_per_s=2.0, num_requests=160, num_prompt_tokens=100, num_output_tokens=40, seed=0)
    cluster = SimCluster(SimConfig(num_replicas=1, cache=CacheConfig(num_blocks=500), faults=(STALL,)))
    timeline = Timeline(cluster, interval_s)
    run(cluster, requests, is_watched=True)
    series = timeline.series["replica-0000"]
    shares = [b for t, b in zip(series.time_s, series.busy, strict=True) if 20.0 < t < 60.0]
    assert shares == pytest.approx([1.0] * len(shares))
    assert sum(series.busy) * interval_s == pytest.approx(cluster.replicas["replica-0000"].busy_s)
