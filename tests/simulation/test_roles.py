"""Simulated prefill and decode replicas; ``run`` always checks that nothing is lost or left held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.policies.roles import num_prefills
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.faults import Crash, Fault, Stall
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.parallel import run_beside
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=400, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, policy="deadline"),
    step_time=StepTime(prefill=PrefillTime(tokens_per_s=4000.0)),
    hold=HoldConfig(),
    transfer_s=0.0005,
    prefill_share=0.5,
)


def prompts(requests_per_s: float = 5.0, num_requests: int = 200) -> list[SimRequest]:
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=200,
        num_prefix_tokens=1024,
        num_own_tokens=300,
        num_output_tokens=40,
        seed=1,
    )


def test_some_compute_prompts_and_others_generate() -> None:
    cluster = run(SimCluster(CONFIG), prompts())
    prefills, decodes = (cluster.ended()[:2], cluster.ended()[2:])
    assert sum(r.stats.num_generated_tokens for r in prefills) == 200  # a first token each
    assert sum(r.stats.num_generated_tokens for r in decodes) == 200 * 39
    assert sum(r.stats.num_finished for r in prefills) == 0
    assert 200 * 16 < sum(r.stats.num_blocks_taken for r in decodes) <= 200 * 20  # some share a prefix
    # What is left of a prompt after its last whole block is computed twice.
    assert sum(r.stats.num_prompt_tokens for r in decodes) < 200 * 2 * 64
    assert not sum(o.num_resumes for o in cluster.book.outcomes.values())


def test_tokens_come_more_evenly() -> None:
    shared, apart = (simulate(replace(CONFIG, prefill_share=share), prompts()) for share in (0.0, 0.5))
    assert apart.inter_token_s.p50 < shared.inter_token_s.p50
    assert apart.inter_token_s.p99 < 0.7 * shared.inter_token_s.p99
    assert apart.latency_s.p50 < shared.latency_s.p50
    assert "inter-token" in apart.summary()


def test_answers_of_one_token_and_cached_prompts_take_one_replica() -> None:
    one = [replace(request, num_output_tokens=1) for request in prompts(num_requests=50)]
    cluster = run(SimCluster(CONFIG), one)
    assert not sum(r.stats.num_generated_tokens for r in cluster.ended()[2:])
    again = SimRequest("again", 60.0, ((7, 64 * 4 + 1),), 40)
    others = [replace(again, request_id=str(n), arrival_s=10.0 * n) for n in range(3)]
    cluster = run(SimCluster(replace(CONFIG, num_replicas=2)), [*others, again])
    first, then = cluster.ended()
    assert first.stats.num_generated_tokens == 1  # the other has the prompt's blocks from then on
    assert then.stats.num_generated_tokens == 4 * 40 - 1


@pytest.mark.parametrize(
    "faults",
    [
        (Crash("replica-0000", 5.0, 30.0),),
        (Crash("replica-0003", 5.0, 30.0), Crash("replica-0002", 12.0, 20.0)),
        (Stall("replica-0001", 4.0, 9.0), Crash("replica-0000", 6.0, 7.0)),
    ],
)
def test_whatever_fails_others_take_the_role(faults: tuple[Fault, ...]) -> None:
    cluster = run(SimCluster(replace(CONFIG, faults=faults)), prompts())
    assert all(o.finished_s is not None for o in cluster.book.outcomes.values())


def test_roles_follow_the_number_of_replicas() -> None:
    scaling = ScalingPlan(
        config=ScaleConfig(min_replicas=1, max_replicas=6, downscale_delay_s=5.0), startup_s=2.0, drain_timeout_s=3.0
    )
    config = replace(CONFIG, num_replicas=1, scaling=scaling)
    cluster = run(SimCluster(config), prompts(requests_per_s=10.0, num_requests=400))
    assert cluster.num_peak > 2
    assert all(o.finished_s is not None for o in cluster.book.outcomes.values())
    for gateway in cluster.gateways:
        roles = [row.role for row in gateway.view.replicas_for((), 0.0)]
        assert roles.count("prefill") <= num_prefills(len(roles), 0.5)


@pytest.mark.parametrize("changes", [{"num_gateways": 4}, {"routing": "llmd_precise", "hold": None}])
def test_with_several_gateways_and_under_other_rules(changes: dict[str, object]) -> None:
    told = simulate(replace(CONFIG, **changes), prompts())  # type: ignore[arg-type]
    assert told.num_finished == 200
    assert told.transfer_rate > 0.5


def test_two_processes_report_the_same() -> None:
    requests = prompts(requests_per_s=9.0)
    beside = SimCluster(CONFIG)
    for request in requests:
        beside.arrive(request)
    run_beside(beside)
    check_conservation(beside)
    assert report(beside).to_json() == simulate(CONFIG, requests).to_json()


def test_the_command_wants_transfers_with_it(tmp_path: Path) -> None:
    app, trace = typer.Typer(), tmp_path / "trace.csv"
    app.command()(sim)
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "500,20\n" * 20, encoding="utf-8")
    options = ["--trace", str(trace), "--format", "lengths", "--replicas", "2", "--prefill-share", "0.5"]
    with pytest.raises(ConfigError, match="--prefill-share requires --transfer-rate"):
        CliRunner().invoke(app, options, catch_exceptions=False)
    done = CliRunner().invoke(app, [*options, "--transfer-rate", "200000"], catch_exceptions=False)
    assert "20 finished" in done.output
