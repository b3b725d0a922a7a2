"""A prefix that many requests begin with comes to more replicas once those that have it are too few."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from shoal_cluster.policies.alike import ALONE, Alike
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.run import report, run
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=1000, block_size=512, enable_partial_reuse=False),
    scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, policy="deadline"),
    hold=HoldConfig(),
)
HOT = 6144  # tokens of the prefix
BURST = 12


def traffic(seed: int) -> list[SimRequest]:
    """A burst of short requests with the same long beginning each second, beside documents that fill the replicas."""
    rng, requests, own = Random(seed), list[SimRequest](), 100
    for second in range(40):
        for number in range(BURST):
            own += 1
            runs = ((1, HOT), (2**20 * own, 300 + rng.randrange(400)))
            requests.append(SimRequest(f"hot-{second}-{number}", float(second), runs, 3))
        for number in range(2):
            own += 1
            length = rng.choice((2000, 6000, 15_000))
            requests.append(SimRequest(f"long-{second}-{number}", second + rng.random(), ((2**20 * own, length),), 60))
    return sorted(requests, key=lambda request: request.arrival_s)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_prefix_that_many_wait_for_is_computed_once_more_where_that_serves_them(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    requests = traffic(seed)
    spread = run(SimCluster(CONFIG), requests)
    monkeypatch.setattr(Alike, "of", lambda self, held: ALONE)
    apart = run(SimCluster(CONFIG), requests)
    hot = [spread.book.outcomes[request.request_id] for request in requests if request.request_id.startswith("hot")]
    cold = Counter(outcome.replica_id for outcome in hot if outcome.num_cached_tokens < HOT)
    assert len({outcome.replica_id for outcome in hot}) >= 3
    assert max(cold.values()) <= 2  # each replica computes it once, or for two at a time
    assert report(spread).goodput > report(apart).goodput + 0.02
    assert report(spread).ttft_s.p50 < 0.9 * report(apart).ttft_s.p50
