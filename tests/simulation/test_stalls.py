"""A replica that stalls in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Hindrances, Stall
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.replica import FeedMessage, SimReplica
from shoal_cluster.sim.run import run
from shoal_cluster.sim.workload import poisson
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams

CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


def test_what_has_not_started_leaves_a_replica_that_stalls() -> None:
    """Requests in the stalled step wait for it; all that were only sent there are answered elsewhere."""
    requests = poisson(requests_per_s=12.0, num_requests=150, num_prompt_tokens=1000, num_output_tokens=4, seed=3)
    cluster = run(SimCluster(replace(CONFIG, faults=(Stall("replica-0000", 5.0, 12.0),))), requests)
    outcomes = cluster.book.outcomes.values()
    moved = [o for o in outcomes if o.num_moves]
    assert moved
    assert all(o.replica_id == "replica-0001" and o.num_moves == 1 for o in moved)
    assert all(o.first_token_s is not None and o.first_token_s < 11.0 for o in moved), "before the step has ended"
    fine = run(SimCluster(CONFIG), requests)
    assert not any(o.num_moves for o in fine.book.outcomes.values())


def test_nothing_goes_to_a_replica_that_stalls_in_its_first_step_until_the_step_ends() -> None:
    """It was idle before; requests that it hands back meanwhile do not make it take others."""
    arrivals_s = [1.0] * 2 + [6.0] * 8 + [6.4 + 0.2 * i for i in range(20)]
    prompts = poisson(
        requests_per_s=1.0, num_requests=len(arrivals_s), num_prompt_tokens=400, num_output_tokens=4, seed=3
    )
    requests = [replace(request, arrival_s=at) for request, at in zip(prompts, arrivals_s, strict=True)]
    cluster = run(SimCluster(replace(CONFIG, faults=(Stall("replica-0000", 5.0, 12.0),))), requests)
    outcomes = [cluster.book.outcomes[request.request_id] for request in requests]
    assert any(outcome.num_moves for outcome in outcomes)
    late = [o for request, o in zip(requests, outcomes, strict=True) if request.arrival_s > 7.5]
    assert {outcome.replica_id for outcome in late} == {"replica-0001"}


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


@pytest.mark.parametrize(("from_s", "until_s"), [(2.0, 2.4), (2.01, 4.5), (2.0, 2.9)])
def test_a_replica_that_only_decodes_stalls_too(from_s: float, until_s: float) -> None:
    """Many of its steps are one event: none of them begins in the stall and ends before it does."""
    loop, step_s = EventLoop(), 0.03
    told: list[tuple[float, int, float]] = []

    def hear(replica: SimReplica, message: FeedMessage) -> None:
        if message.stats is not None and message.stats.num_generated_tokens > (told[-1][1] if told else 0):
            told.append((loop.now, message.stats.num_generated_tokens, replica.busy_s))

    stalls = Hindrances([Stall("a", from_s, until_s)])
    replica = SimReplica("a", loop, CONFIG.scheduler, CONFIG.cache, StepTime(decode_s=step_s), hear, stalls)
    request = Request(request_id="r", prompt_token_ids=tuple(range(64)), sampling_params=SamplingParams(max_tokens=200))
    loop.at(0.0, lambda: replica.add(request))
    loop.run()
    before = [time_s for time_s, _, _ in told if time_s < until_s]
    assert from_s <= before[-1] < from_s + step_s, "the last step begun before it"
    after_s = next(time_s for time_s, _, _ in told if time_s > before[-1])
    assert after_s == pytest.approx(until_s)
    num_before = next(n for time_s, n, _ in told if time_s == before[-1])
    num_after = next(n for time_s, n, _ in told if time_s == after_s)
    assert num_after == num_before + 1
    assert told[-1][2] == pytest.approx(told[-1][0]), "busy all the time"
