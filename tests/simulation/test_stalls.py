"""A replica that stalls in simulated time."""

from __future__ import annotations

from dataclasses import replace

from shoal_cluster.policies.pending import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig, Stall
from shoal_cluster.sim.run import run
from shoal_cluster.sim.workload import poisson
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


def test_what_has_not_started_leaves_a_replica_that_stalls() -> None:
    """Those whose step stalls wait for it; all that was only sent there is answered elsewhere."""
    requests = poisson(requests_per_s=12.0, num_requests=150, num_prompt_tokens=1000, num_output_tokens=4, seed=3)
    cluster = run(SimCluster(replace(CONFIG, stalls=(Stall("replica-0000", 5.0, 12.0),))), requests)
    outcomes = cluster.book.outcomes.values()
    moved = [o for o in outcomes if o.num_moves]
    assert moved
    assert all(o.replica_id == "replica-0001" and o.num_moves == 1 for o in moved)
    assert all(o.first_token_s is not None and o.first_token_s < 11.0 for o in moved), "before the step has ended"
    fine = run(SimCluster(CONFIG), requests)
    assert not any(o.num_moves for o in fine.book.outcomes.values())


def test_what_was_handed_back_stays_where_only_those_who_did_so_could_take_it() -> None:
    cluster = SimCluster(CONFIG)
    (request,) = poisson(requests_per_s=1.0, num_requests=1, num_prompt_tokens=1000, num_output_tokens=4, seed=3)
    cluster.book.expect(request)
    gateway = cluster.gateways[0]
    gateway.take(request)
    outcome = cluster.book.outcomes[request.request_id]
    first = outcome.replica_id
    gateway._recall(first)
    second = outcome.replica_id
    assert second != first
    gateway._recall(second)
    assert not gateway.queue
    assert (outcome.replica_id, outcome.num_moves) == (second, 1)
