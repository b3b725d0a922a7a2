"""Refusing requests that cannot have their first token in time, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.faults import Crash
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, poisson
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=400, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)
SHEDDING = replace(CONFIG, limits=AdmissionLimits(objective=LatencyObjective()))


def prompts(requests_per_s: float, seed: int = 1, num_long: int = 100) -> list[SimRequest]:
    """Long prompts, and four times as many short ones, with a tenth of the tokens."""
    long = poisson(
        requests_per_s=requests_per_s / 4,
        num_requests=num_long,
        num_prompt_tokens=8000,
        num_output_tokens=4,
        seed=seed,
    )
    short = poisson(
        requests_per_s=requests_per_s,
        num_requests=4 * num_long,
        num_prompt_tokens=800,
        num_output_tokens=4,
        seed=seed + 1,
    )
    mixed = [replace(r, request_id=f"{i}-{r.request_id}") for i, part in enumerate((long, short)) for r in part]
    return sorted(mixed, key=lambda request: request.arrival_s)


def test_what_cannot_be_in_time_leaves_its_place_to_what_can() -> None:
    """At the edge of overload and in it, more requests are in time than without refusals; far beyond it about as many,
    since requests that are put off cost the others nothing either. None waits long.
    """
    for requests_per_s in (5.0, 6.0, 8.0, 12.0):
        requests = prompts(requests_per_s, num_long=300)
        plain, shedding = simulate(CONFIG, requests), simulate(SHEDDING, requests)
        assert plain.num_shed == 0
        assert shedding.num_shed > 0
        assert shedding.goodput > plain.goodput or (requests_per_s > 8.0 and shedding.goodput > plain.goodput - 0.01)
        assert shedding.ttft_s.p99 < 0.1 * plain.ttft_s.p99


def test_next_to_nobody_is_refused_where_there_is_room() -> None:
    requests = prompts(4.0)
    plain, shedding = simulate(CONFIG, requests), simulate(SHEDDING, requests)
    assert shedding.num_shed <= (1 - plain.goodput) * len(requests)
    assert shedding.goodput >= plain.goodput


def test_what_is_lost_while_nobody_is_there_is_refused_when_somebody_is_whose_pace_is_known() -> None:
    """Until then, no request counts as late."""
    config = replace(SHEDDING, num_replicas=1, faults=(Crash("replica-0000", 3.0, 40.0),))
    cluster = run(SimCluster(config), prompts(6.0))
    refused = [o for o in cluster.book.outcomes.values() if o.refusal is not None]
    assert refused
    plain = run(SimCluster(replace(config, limits=AdmissionLimits())), prompts(6.0))
    assert report(cluster).ttft_s.p99 < report(plain).ttft_s.p99


def test_a_flood_of_one_tenant_is_refused_and_the_others_are_not() -> None:
    """Two modest tenants ask for a quarter of what the replicas can do, the third for ten times as much."""
    rates = {"modest-a": 2.0, "modest-b": 2.0, "flood": 160.0}
    requests = [
        replace(request, request_id=f"{tenant}-{request.request_id}", tenant=tenant)
        for seed, (tenant, rate) in enumerate(rates.items())
        for request in poisson(
            requests_per_s=rate,
            num_requests=int(20 * rate),
            num_prompt_tokens=800,
            num_output_tokens=4,
            seed=seed,
        )
    ]
    config = replace(CONFIG, limits=AdmissionLimits(max_waiting_requests=50))
    cluster = run(SimCluster(config), sorted(requests, key=lambda request: request.arrival_s))
    refused = [request_id for request_id, outcome in cluster.book.outcomes.items() if outcome.first_token_s is None]
    assert len(refused) > 1000
    assert all(request_id.startswith("flood") for request_id in refused)


@pytest.mark.parametrize(("num_gateways", "most"), [(1, 6), (2, 3)])
def test_short_prompts_push_long_ones_out(num_gateways: int, most: int) -> None:
    """Six may wait at the replica. Each of two gateways takes the other to hold as many as it does."""
    limits = AdmissionLimits(max_waiting_requests=6)
    cluster = SimCluster(replace(CONFIG, num_replicas=1, num_gateways=num_gateways, limits=limits))
    gateway, held = cluster.gateways[0], list[int]()

    def take(request: SimRequest) -> None:
        gateway.take(request)
        held.append(len(gateway.queue or ()))

    for number in range(18):
        name, num_tokens = ("long", 8000) if number < 9 else ("short", 800)
        request = SimRequest(f"{name}{number}", 1.0 + number // 9 * 0.01, ((number, num_tokens),), 4)
        cluster.book.expect(request)
        cluster.loop.at(request.arrival_s, partial(take, request))
    cluster.loop.run()
    assert max(held) == most
    refused = [request_id for request_id, outcome in cluster.book.outcomes.items() if outcome.refusal is not None]
    assert any(request_id.startswith("long") for request_id in refused)
