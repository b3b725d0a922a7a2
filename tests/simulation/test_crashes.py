"""A replica that crashes in simulated time; ``run`` always checks that nothing is lost, repeated or left held."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.baselines import Routing
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.capacity import find_replicas
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Crash, Fault, Stall
from shoal_cluster.sim.gateway import SimGateway
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.replica import FeedMessage, SimReplica
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, poisson, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams

CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


END_OF_A_STEP_S = StepTime().prefill.seconds(0, 64) + 0.03 + 0.03 + 0.03  # summed in this order, for the same rounding


def chats(num_requests: int = 120, requests_per_s: float = 6.0, seed: int = 1) -> list[SimRequest]:
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=4,
        num_prefix_tokens=512,
        num_own_tokens=100,
        num_output_tokens=60,
        seed=seed,
    )


def test_what_a_crashed_replica_had_goes_on_elsewhere() -> None:
    crash = Crash("replica-0000", 5.0, 9.0)
    cluster = run(SimCluster(replace(CONFIG, faults=(crash,))), chats())
    outcomes = cluster.book.outcomes.values()
    resumed = [o for o in outcomes if o.num_resumes]
    assert any(o.first_token_s is not None and o.first_token_s < 5.0 for o in resumed), "in the middle of an answer"
    assert all(o.replica_id != "replica-0000" and o.num_output_tokens == 60 for o in resumed)
    assert all(o.arrival_s < 5.0 + CONFIG.feed_delay_s for o in resumed)
    assert {o.replica_id for o in outcomes if o.arrival_s > 10.0} == {"replica-0001", "replica-0002"}
    assert not any(o.replica_id == "replica-0002" for o in outcomes if (o.finished_s or 0.0) < 9.0)
    assert report(cluster).num_resumes == len(resumed)


def test_what_goes_on_does_so_at_its_gateway_before_what_is_held_there() -> None:
    """One replica is left, with more work than it can do: requests in the middle of an answer still go first."""
    config = replace(CONFIG, num_gateways=2, faults=(Crash("replica-0000", 5.0, 60.0),))
    cluster = SimCluster(config)
    resumed: list[tuple[float, str, str]] = []
    for gateway in cluster.gateways:

        def resume(
            request_id: str, gateway: SimGateway = gateway, before: Callable[[str], None] = gateway.resume
        ) -> None:
            resumed.append((cluster.loop.now, gateway.gateway_id, request_id))
            before(request_id)

        gateway.resume = resume  # type: ignore[method-assign]
    run(cluster, chats(num_requests=300, requests_per_s=40.0))
    outcomes = cluster.book.outcomes
    assert {gateway_id for _, gateway_id, _ in resumed} == {"gateway-0", "gateway-1"}
    assert all(outcomes[request_id].gateway_id == gateway_id for _, gateway_id, request_id in resumed)
    begun = [i for _, _, i in resumed if (outcomes[i].first_token_s or math.inf) < 5.0]
    held = [o for o in outcomes.values() if o.arrival_s < 5.0 and (o.first_token_s or 0.0) > 6.0 and not o.num_resumes]
    assert begun
    assert held
    assert max(outcomes[i].finished_s or math.inf for i in begun) < min(o.finished_s or 0.0 for o in held)


def test_a_crash_costs_what_the_replica_had_cached() -> None:
    fine = simulate(CONFIG, chats(requests_per_s=1.0))
    crashed = simulate(replace(CONFIG, faults=(Crash("replica-0000", 60.0, 61.0),)), chats(requests_per_s=1.0))
    assert crashed.num_finished == fine.num_finished == 120
    assert crashed.hit_rate < fine.hit_rate
    assert crashed.predicted_hit_rate == pytest.approx(crashed.hit_rate, abs=0.01), "the gateway knows"


def test_requests_wait_for_the_replica_in_the_place_of_the_only_one() -> None:
    config = replace(CONFIG, num_replicas=1, faults=(Crash("replica-0000", 3.0, 20.0),))
    cluster = run(SimCluster(config), chats(num_requests=40))
    late = [o for o in cluster.book.outcomes.values() if 3.0 < o.arrival_s < 20.0]
    assert late
    assert all(o.refusal is None and o.first_token_s is not None and o.first_token_s > 20.0 for o in late)


def test_what_no_replica_can_hold_is_refused_when_one_is_there_again() -> None:
    config = replace(CONFIG, num_replicas=1, faults=(Crash("replica-0000", 3.0, 20.0),))
    giant = SimRequest("giant", 5.0, ((1, 200 * 64),), 4)
    cluster = run(SimCluster(config), [giant, *chats(num_requests=40)])
    refusals = [o.refusal for o in cluster.book.outcomes.values() if o.refusal is not None]
    assert refusals == ["the request needs 201 blocks and the largest replica has 200"]


def test_rules_that_hold_nothing_refuse_while_nobody_is_there() -> None:
    config = replace(CONFIG, num_replicas=1, hold=None, routing="least_requests")
    cluster = run(SimCluster(replace(config, faults=(Crash("replica-0000", 3.0, 8.0),))), chats(requests_per_s=2.0))
    outcomes = cluster.book.outcomes.values()
    refused = [o.arrival_s for o in outcomes if o.refusal is not None]
    assert refused
    assert max(refused) < 8.0
    assert any(o.arrival_s > 8.0 and o.finished_s is not None for o in outcomes)


def test_a_crash_before_the_first_request_or_after_the_last_changes_no_answer() -> None:
    requests = [replace(r, arrival_s=r.arrival_s + 50.0) for r in chats(num_requests=20)]
    fine = simulate(CONFIG, requests)
    early = simulate(replace(CONFIG, faults=(Crash("replica-0001", 1.0, 2.0),)), requests)
    late = simulate(replace(CONFIG, faults=(Crash("replica-0001", 5000.0, 6000.0),)), requests)
    assert (early.ttft_s, early.num_resumes) == (fine.ttft_s, 0)
    assert late.to_json() == fine.to_json()


def test_a_scaler_replaces_what_has_crashed() -> None:
    plan = ScalingPlan(config=ScaleConfig(min_replicas=2, max_replicas=2), startup_s=3.0)
    config = replace(CONFIG, scaling=plan, faults=(Crash("replica-0000", 5.0, 6.0),))
    cluster = run(SimCluster(config), chats(requests_per_s=4.0))
    assert cluster.replicas.keys() == {"replica-0001", "replica-0002"}
    assert cluster.replicas["replica-0002"].started_s >= 5.0 + plan.startup_s
    assert cluster.num_peak == 2


@pytest.mark.parametrize(
    "crash_s", [2.0, 2.0101, 0.001, 5.0, END_OF_A_STEP_S - 1e-9, END_OF_A_STEP_S, END_OF_A_STEP_S + 1e-9]
)
def test_a_replica_that_only_decodes_has_told_the_tokens_of_all_steps_that_ended(crash_s: float) -> None:
    """Many of its steps are one event: those that end before the crash count, and none after it."""
    loop, step_s = EventLoop(), 0.03
    ends_s: list[float] = []
    tokens: list[int] = []

    def hear(replica: SimReplica, message: FeedMessage) -> None:
        tokens.extend(token for delta in message.deltas for token in delta.token_ids)
        ends_s.append(loop.now)

    step_time = StepTime(decode_s=step_s)
    replica = SimReplica("a", loop, CONFIG.scheduler, CONFIG.cache, step_time, hear, (), crash_s)
    request = Request(request_id="r", prompt_token_ids=tuple(range(64)), sampling_params=SamplingParams(max_tokens=999))
    loop.at(0.0, lambda: replica.add(request))
    loop.at(crash_s, replica.crash)
    loop.run()
    ended_s, num_ended = step_time.prefill.seconds(0, 64), 0
    while ended_s < crash_s:
        ended_s, num_ended = ended_s + step_s, num_ended + 1
    assert len(tokens) == num_ended
    assert ends_s[-1] == crash_s, "silent from then on"
    replica.ended()


def test_the_least_number_of_replicas_has_one_more_where_one_crashes() -> None:
    requests = chats(num_requests=200, requests_per_s=16.0)
    crash = Crash("replica-0000", 2.0, 60.0)
    fine = find_replicas(CONFIG, requests, goodput=0.995)
    assert find_replicas(replace(CONFIG, faults=(crash,)), requests, goodput=0.995) == fine + 1


faults = st.builds(
    lambda kind, number, from_s, for_s: kind(f"replica-{number:04d}", from_s, from_s + for_s),
    st.sampled_from((Crash, Stall)),
    st.integers(0, 3),
    st.floats(0.0, 12.0),
    st.floats(0.001, 6.0),
)


@settings(max_examples=40)
@given(
    faults=st.lists(faults, max_size=5).map(tuple),
    num_replicas=st.integers(1, 3),
    num_gateways=st.integers(1, 3),
    routing=st.sampled_from(("", *get_args(Routing))),
    num_blocks=st.sampled_from((24, 200)),
    requests_per_s=st.sampled_from((2.0, 8.0, 40.0)),
    is_scaled=st.booleans(),
    seed=st.integers(0, 3),
)
def test_whatever_fails_every_request_ends_once_and_every_token_comes_once(
    faults: tuple[Fault, ...],
    num_replicas: int,
    num_gateways: int,
    routing: str,
    num_blocks: int,
    requests_per_s: float,
    is_scaled: bool,
    seed: int,
) -> None:
    """With ``routing`` "", gateways hold requests."""
    plan = ScalingPlan(
        config=ScaleConfig(min_replicas=num_replicas, max_replicas=4), startup_s=2.0, drain_timeout_s=1.0
    )
    config = replace(
        CONFIG,
        num_replicas=num_replicas,
        num_gateways=num_gateways,
        cache=CacheConfig(num_blocks=num_blocks, block_size=64),
        hold=None if routing else HoldConfig(),
        routing=next((name for name in get_args(Routing) if name == routing), "predicted_ttft"),
        scaling=plan if is_scaled else None,
        faults=faults,
        seed=seed,
    )
    requests = poisson(
        requests_per_s=requests_per_s, num_requests=30, num_prompt_tokens=500, num_output_tokens=40, seed=seed
    )
    cluster = run(SimCluster(config), requests)
    assert all(o.num_output_tokens == 40 for o in cluster.book.outcomes.values() if o.refusal is None)
    assert simulate(config, requests) == report(cluster)


TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}\n' * 20


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("crash:8@1+1", "must be below 8"),
        ("crash:1@1", "must be such as"),
        ("slow:1@1+1", "must be such as"),
        ("slow:1@1+1x0.5", "0.5 times .*must be 1 to 100"),
        ("slow:9@1+1x2", "replica 9 .*must be below 8"),
        ("crash:1@1+0", "must be above 0"),
        ("stall:1@-1+2", "must be such as"),
        ("stall:1@1+1e9", "must be such as"),
        ("stall:1@1+999999", "at most 86400"),
        ("crash:1@1+1", "of a replica that crashes at 0.5 s; must end before that"),
    ],
)
def test_a_fault_that_is_none_is_refused(tmp_path: Path, fault: str, says: str) -> None:
    (trace := tmp_path / "trace.jsonl").write_text(TRACE)
    app = typer.Typer()
    app.command()(sim)
    with pytest.raises(ConfigError, match=f"fault: got .*{says}"):
        CliRunner().invoke(
            app, ["--trace", str(trace), "--fault", "crash:1@0.5+9", "--fault", fault], catch_exceptions=False
        )


def test_faults_are_given_on_the_command_line(tmp_path: Path) -> None:
    (trace := tmp_path / "trace.jsonl").write_text(TRACE)
    app = typer.Typer()
    app.command()(sim)
    arguments = ["--trace", str(trace), "--json", "--fault", "crash:1@0.3+5", "--fault", "stall:0@0.1+2"]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--replicas", "2"], catch_exceptions=False).output)
    assert told["num_finished"] == 20
    assert told["num_resumes"] > 0
    assert told["latency_s"]["max"] > 2.0
    for search, says in (
        ("--find-replicas", "must be below 1"),
        ("--find-capacity", "--fault cannot be combined with --find-capacity"),
    ):
        with pytest.raises(ConfigError, match=says):
            CliRunner().invoke(app, [*arguments, search], catch_exceptions=False)


def test_a_fault_has_times() -> None:
    with pytest.raises(ValueError, match=r"until_s: got 2\.0; must be finite and not before from_s, 3\.0"):
        Crash("replica-0000", 3.0, 2.0)
