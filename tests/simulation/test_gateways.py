"""Several gateways over the same replicas."""

from __future__ import annotations

from dataclasses import replace

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.faults import Stall
from shoal_cluster.sim.run import report, run
from shoal_cluster.sim.workload import SimRequest, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
    num_gateways=2,
)


def test_what_begins_like_a_prompt_of_another_gateway_follows_it() -> None:
    """Even before any block of that prompt is cached: the gateway goes by what the replica reports of it."""
    cluster = SimCluster(CONFIG)
    first = SimRequest("first", 1.0, ((7, 640), (8, 100)), 4)
    second = SimRequest("second", 1.05, ((7, 640), (9, 100)), 4)
    for gateway, request in zip(cluster.gateways, (first, second), strict=True):
        cluster.book.expect(request)
        cluster.loop.at(request.arrival_s, lambda gateway=gateway, request=request: gateway.take(request))
    cluster.loop.run()
    outcomes = cluster.book.outcomes
    assert outcomes["first"].replica_id == outcomes["second"].replica_id
    assert outcomes["second"].num_predicted_tokens == outcomes["second"].num_cached_tokens == 640
    assert report(cluster).num_finished == 2


def test_what_a_stalled_replica_hands_back_no_gateway_expects_there_any_more() -> None:
    """Every run also checks that at its end no gateway expects anything anywhere."""
    requests = shared_prefixes(
        requests_per_s=20.0,
        num_requests=400,
        num_groups=12,
        num_prefix_tokens=512,
        num_own_tokens=200,
        num_output_tokens=10,
        seed=5,
    )
    config = replace(CONFIG, num_gateways=3, faults=(Stall("replica-0000", 5.0, 12.0),))
    cluster = SimCluster(config)
    stale: list[str] = []

    def look(replica_id: str, request_id: str) -> None:
        last = cluster.book.requests[request_id].block_hashes(CONFIG.cache.block_size)[-1:]
        for gateway in cluster.gateways:
            index = gateway.view.index
            if index.expected.are_at(index.slot(replica_id), last).any():
                stale.append(request_id)

    replica = cluster.replicas["replica-0000"]
    hand_back = replica.hand_back

    def watched(request_id: str) -> bool:
        is_back = hand_back(request_id)
        if is_back:
            cluster.loop.after(4 * config.feed_delay_s, lambda: look(replica.replica_id, request_id))
        return is_back

    replica.hand_back = watched  # type: ignore[method-assign]
    run(cluster, requests)
    assert any(outcome.num_moves for outcome in cluster.book.outcomes.values())
    assert stale == []


def test_nobody_counts_a_promise_twice() -> None:
    """Neither the gateway that made it, when the replica tells of it, nor the other one."""
    cluster, seen = SimCluster(CONFIG), list[set[int]]()
    request = SimRequest("r", 1.003, ((1, 8000),), 4)

    def look() -> None:
        rows = [gateway.view.replicas_for((), cluster.loop.now) for gateway in cluster.gateways]
        seen.append({sum(row.num_reserved for row in of_one) for of_one in rows})
        if cluster.book.num_open:
            cluster.loop.after(0.0005, look)

    cluster.book.expect(request)
    cluster.loop.at(request.arrival_s, lambda: cluster.gateways[0].take(request))
    cluster.loop.at(request.arrival_s, look)
    cluster.loop.run()
    assert set.union(*seen) == {0, 1}
    assert {1} in seen, "both know of it"
