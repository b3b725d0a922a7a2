"""Replicas of different speed in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.slowness import Slowness
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Hindrances, Slow, Stall
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.replica import FeedMessage, SimReplica
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, poisson, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=400, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
    faults=(Slow("replica-0000", 0.0, 80_000.0, 4.0),),
)


def prompts(requests_per_s: float = 9.0) -> list[SimRequest]:
    return poisson(
        requests_per_s=requests_per_s, num_requests=1500, num_prompt_tokens=2000, num_output_tokens=4, seed=3
    )


def test_a_slow_replica_gets_what_it_can_do_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = run(SimCluster(CONFIG), prompts())
    outcomes = cluster.book.outcomes.values()
    slow = sum(o.replica_id == "replica-0000" for o in outcomes)
    assert 0 < slow < len(outcomes) / 12, "three do a request in 0.25 s, it takes a second"
    assert [row.slowness for row in cluster.gateways[0].view.replicas_for((), 0.0)] == [4.0, 1.0, 1.0, 1.0]
    monkeypatch.setattr(Slowness, "look", lambda *_: None)
    assert report(cluster).goodput > simulate(CONFIG, prompts()).goodput + 0.01


def test_like_replicas_are_served_as_if_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, faults=())
    seen = simulate(config, prompts())
    monkeypatch.setattr(Slowness, "look", lambda *_: None)
    assert simulate(config, prompts()) == seen


def traffic(
    chats_per_s: float, num_own_tokens: int, num_output_tokens: int, documents_per_s: float
) -> list[SimRequest]:
    """Some four minutes of conversations beside documents of 4 000 tokens."""
    chats = shared_prefixes(
        requests_per_s=chats_per_s,
        num_requests=int(260 * chats_per_s),
        num_groups=12,
        num_prefix_tokens=6000,
        num_own_tokens=num_own_tokens,
        num_output_tokens=num_output_tokens,
        seed=2,
    )
    documents = poisson(
        requests_per_s=documents_per_s,
        num_requests=int(260 * documents_per_s),
        num_prompt_tokens=4000,
        num_output_tokens=20,
        seed=2,
    )
    documents = [replace(document, request_id=f"document-{n}") for n, document in enumerate(documents)]
    return sorted([*chats, *documents], key=lambda request: request.arrival_s)


@pytest.mark.parametrize(
    ("requests", "max_num_batched_tokens", "differing"),
    [
        # Replicas with chats compute a hundred tokens at a time, each time with a step's constant; others whole steps.
        (traffic(10.0, 100, 20, 0.4), 2048, "token_s"),
        # Decodes beside a full step make it half as long again.
        (traffic(24.0, 280, 150, 0.1), 512, "full_token_s"),
    ],
)
def test_like_replicas_are_not_slow_for_what_they_compute(
    requests: list[SimRequest], max_num_batched_tokens: int, differing: str
) -> None:
    config = replace(
        CONFIG,
        faults=(),
        num_replicas=8,
        cache=CacheConfig(num_blocks=8000, block_size=64),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens, policy="deadline"),
        step_time=StepTime(step_s=0.015 if max_num_batched_tokens > 512 else 0.0),
    )
    cluster = SimCluster(config)
    slowness: set[float] = set()
    ratios: list[float] = []

    def look() -> None:
        rows = cluster.gateways[0].view.replicas_for((), 0.0)
        slowness.update(row.slowness for row in rows)
        paces = [pace for row in rows if row.stats is not None and (pace := getattr(row.stats, differing)) > 0]
        ratios.append(max(paces) / min(paces) if paces else 1.0)
        if cluster.book.num_open:
            cluster.loop.after(1.0, look)

    cluster.loop.after(0.0, look)
    run(cluster, requests)
    assert max(ratios) > 1.4, "their paces differ as if some were slow"
    assert slowness == {1.0}


@pytest.mark.parametrize(("from_s", "until_s"), [(0.0, 100.0), (1.0, 2.0), (1.01, 2.02), (2.5, 2.6)])
def test_steps_that_begin_while_it_is_slow_take_as_many_times_as_long(from_s: float, until_s: float) -> None:
    """Many decodes are one event; each takes as long as the speed at its beginning says."""
    loop, step_s, factor = EventLoop(), 0.03, 3.0
    told: list[float] = []

    def hear(replica: SimReplica, message: FeedMessage) -> None:
        if message.stats is not None and message.stats.num_generated_tokens:
            told.append(loop.now)

    faults = Hindrances([Slow("a", from_s, until_s, factor)])
    replica = SimReplica("a", loop, CONFIG.scheduler, CONFIG.cache, StepTime(decode_s=step_s), hear, faults)
    request = Request(request_id="r", prompt_token_ids=tuple(range(64)), sampling_params=SamplingParams(max_tokens=100))
    loop.at(0.0, lambda: replica.add(request))
    loop.run()
    now = told[0]  # the prompt's step; 99 decodes follow
    for _ in range(99):
        now += step_s * (factor if from_s <= now < until_s else 1.0)
    assert told[-1] == pytest.approx(now)
    assert replica.busy_s == pytest.approx(now)


def test_what_hinders_several_times_over() -> None:
    faults = Hindrances([Slow("a", 1.0, 4.0, 2.0), Slow("a", 2.0, 3.0, 5.0), Stall("a", 3.5, 6.0)])
    assert [faults.factor(now) for now in (0.5, 1.0, 2.0, 3.0, 4.0)] == [1.0, 2.0, 10.0, 2.0, 1.0]
    assert [faults.next_s(now) for now in (0.0, 1.0, 2.5, 3.0, 3.5)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert faults.stalled_s(5.0) == 1.0
