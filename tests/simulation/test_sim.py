"""Whole clusters in simulated time, with the real scheduler and the real policies."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.policies.admission import AdmissionLimits, Queued, keep
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.baselines import ROUTINGS, Routing
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.sim.capacity import carries, find_capacity
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Crash
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.report import Distribution
from shoal_cluster.sim.run import report, simulate
from shoal_cluster.sim.steady import SteadyScheduler
from shoal_cluster.sim.traces import read_trace
from shoal_cluster.sim.workload import SimRequest, poisson, repeat, shared_prefixes, speed_up
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.executor import ScheduledSequence, SchedulerOutput
from shoal_replica.prefix_cache import hash_blocks

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
)


def chats(seed: int = 1, requests_per_s: float = 8.0, num_requests: int = 300) -> list[SimRequest]:
    """Sixteen system prompts of 1 024 tokens. All replicas' caches together hold them all; that of one does not."""
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=16,
        num_prefix_tokens=1024,
        num_own_tokens=100,
        num_output_tokens=20,
        seed=seed,
    )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_same_seed_same_report_byte_for_byte(routing: Routing) -> None:
    config = replace(CONFIG, routing=routing)
    requests = chats(num_requests=100)
    assert simulate(config, requests).to_json() == simulate(config, requests).to_json()


def test_another_process_reports_the_same(tmp_path: Path) -> None:
    """Sets of strings have another order there."""
    rows = [
        {"timestamp": 50 * i, "input_length": 1200, "output_length": 20, "hash_ids": [i % 7, 2 * i + 9, 2 * i + 10]}
        for i in range(200)
    ]
    (trace := tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "shoal_cluster.cli", "sim", "--trace", str(trace), "--replicas", "3", "--json"]
    command += ["--gateways", "2", "--fault", "crash:0@2+3", "--fault", "stall:1@5+2"]
    told = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]


def test_another_seed_breaks_ties_differently() -> None:
    requests = chats(num_requests=100)
    assert simulate(CONFIG, requests).to_json() != simulate(replace(CONFIG, seed=1), requests).to_json()


def test_prefix_routing_beats_round_robin() -> None:
    ours = simulate(CONFIG, chats())
    theirs = simulate(replace(CONFIG, routing="round_robin"), chats())
    assert ours.num_finished == theirs.num_finished == 300
    assert ours.hit_rate > 1.2 * theirs.hit_rate
    assert ours.ttft_s.mean < theirs.ttft_s.mean
    assert ours.imbalance < 1.5


def test_predicted_hits_are_the_actual_ones() -> None:
    report = simulate(CONFIG, chats(requests_per_s=2.0))
    assert report.hit_rate > 0.5
    assert report.predicted_hit_rate == pytest.approx(report.hit_rate, abs=0.01)


def test_a_pool_under_pressure_preempts_and_conserves() -> None:
    config = replace(CONFIG, cache=CacheConfig(num_blocks=40, block_size=16))
    requests = poisson(requests_per_s=50, num_requests=120, num_prompt_tokens=100, num_output_tokens=200, seed=3)
    report = simulate(config, requests)
    assert report.num_preemptions > 0
    assert report.num_output_tokens == 120 * 200


def test_what_the_pool_gives_up_comes_back_from_host_memory() -> None:
    """Sixteen prefixes of 16 blocks, in pools of 40 blocks that keep none of them for long."""
    config = replace(CONFIG, cache=CacheConfig(num_blocks=40, block_size=64))
    with_host = replace(config, cache=replace(config.cache, num_host_blocks=400))
    slowly = replace(with_host, step_time=replace(config.step_time, move_s=0.05))
    without, free, slow = (simulate(c, chats()) for c in (config, with_host, slowly))
    assert without.host_hit_rate == 0 < free.host_hit_rate < free.hit_rate
    assert free.hit_rate > 1.2 * without.hit_rate
    assert free.predicted_hit_rate == pytest.approx(free.hit_rate, abs=0.02)
    assert free.ttft_s.mean < without.ttft_s.mean
    assert free.ttft_s.mean < slow.ttft_s.mean, "moves take their time"
    assert "from host memory" in free.summary()
    assert "from host memory" not in without.summary()


def test_an_idle_replica_is_not_taken_for_a_silent_one() -> None:
    """After two lulls of a minute, every replica still gets its share of the requests that follow."""
    bursts = [
        replace(r, request_id=f"{lull}-{r.request_id}", arrival_s=r.arrival_s + 60 * lull)
        for lull in range(3)
        for r in poisson(requests_per_s=50, num_requests=20, num_prompt_tokens=500, num_output_tokens=4, seed=lull)
    ]
    report = simulate(CONFIG, bursts)
    assert report.num_finished == 60
    assert report.imbalance < 1.15


def test_overload_is_shed_and_counts_against_goodput() -> None:
    config = replace(CONFIG, num_replicas=1, limits=AdmissionLimits(max_waiting_tokens=4096))
    report = simulate(config, chats(requests_per_s=100))
    assert report.num_shed > 0
    assert report.num_finished + report.num_shed == 300
    assert report.goodput <= report.num_finished / 300


def test_no_more_is_held_than_gateways_hold_while_no_replica_takes_requests() -> None:
    limits = AdmissionLimits(max_waiting_tokens=4096)
    held = replace(CONFIG, routing="predicted_ttft", hold=HoldConfig(), num_replicas=1, limits=limits)
    cluster = SimCluster(replace(held, faults=(Crash("replica-0000", 0.0, 60.0),)))
    for request in chats(requests_per_s=100):
        cluster.arrive(request)
    cluster.loop.run_until(30.0)
    gateway = cluster.gateways[0]
    assert gateway.queue is not None
    assert (last := gateway.queue.last()) is not None
    candidates, num_others = gateway.view.candidates((), 30.0), len(gateway.queue) - 1
    assert keep(last.query, candidates, limits, Queued(gateway.queue.num_tokens, num_others)).admitted
    assert sum(outcome.refusal is not None for outcome in cluster.book.outcomes.values()) > 200


def test_a_request_no_pool_can_hold_is_refused() -> None:
    giant = SimRequest("giant", 0.0, ((1, 200 * 64),), 4)
    report = simulate(CONFIG, [giant, *chats(num_requests=5)])
    assert (report.num_shed, report.num_finished) == (1, 5)


def reserve(cluster: SimCluster) -> None:
    cluster.gateways[0].view.reserve("request-3", "replica-0000", 1, 1)


def expect(cluster: SimCluster) -> None:
    cluster.gateways[0].view.expect("request-3", "replica-0000", hash_blocks(range(64), 64))


def cache(cluster: SimCluster) -> None:
    cluster.gateways[0].view.index.store("replica-0000", hash_blocks(range(64), 64))


def refuse(cluster: SimCluster) -> None:
    cluster.book.outcomes["request-3"].refusal = "it has finished, too"


def give_to_another(cluster: SimCluster) -> None:
    cluster.book.outcomes["request-3"].num_output_tokens -= 1
    cluster.book.outcomes["request-4"].num_output_tokens += 1


def lose(cluster: SimCluster) -> None:
    cluster.replicas["replica-0000"].scheduler.totals.num_generated_tokens += 1


@pytest.mark.parametrize("spoil", [reserve, expect, cache, refuse, give_to_another, lose])
def test_conservation_catches(spoil: Callable[[SimCluster], None]) -> None:
    cluster = SimCluster(CONFIG)
    for request in chats(num_requests=5):
        cluster.arrive(request)
    cluster.loop.run()
    check_conservation(cluster)
    spoil(cluster)
    with pytest.raises(AssertionError):
        check_conservation(cluster)


def test_the_autoscaler_grows_under_load_and_drains_without_loss() -> None:
    burst = chats(requests_per_s=30, num_requests=300)
    quiet = [replace(r, request_id=f"late-{r.request_id}", arrival_s=r.arrival_s * 20 + 30) for r in burst[:60]]
    plan = ScalingPlan(
        config=ScaleConfig(max_replicas=6, target_utilization=0.6, downscale_delay_s=10.0),
        interval_s=1.0,
        startup_s=3.0,
    )
    report = simulate(replace(CONFIG, num_replicas=1, scaling=plan), [*burst, *quiet])
    assert report.num_finished == 360
    assert report.num_replicas_peak > 2
    assert report.num_shed == 0


def test_the_share_that_may_miss_its_objective_is_exact() -> None:
    """No pool holds a giant: of ten requests, one may be refused and not two."""
    giants = [SimRequest(f"giant{i}", 0.0, ((i, 200 * 64),), 4) for i in range(2)]
    assert carries(CONFIG, [giants[0], *chats(num_requests=9, requests_per_s=1.0)], 0.9)
    assert not carries(CONFIG, [*giants, *chats(num_requests=8, requests_per_s=1.0)], 0.9)


def test_an_empty_run_reports_zeros() -> None:
    report = simulate(CONFIG, [])
    assert (report.num_requests, report.goodput, report.ttft_s.p99) == (0, 0.0, 0.0)


def test_event_order_is_time_then_insertion() -> None:
    loop = EventLoop()
    seen: list[str] = []

    def second() -> None:
        seen.append("second")
        loop.after(0.5, lambda: seen.append("nested"))

    loop.at(2.0, lambda: seen.append("late"))
    loop.at(1.0, lambda: seen.append("first"))
    loop.at(1.0, second)
    loop.run()
    assert seen == ["first", "second", "nested", "late"]
    with pytest.raises(ValueError, match="already"):
        loop.at(1.0, lambda: None)


def test_step_time_adds_prefills_and_one_weight_read() -> None:
    time = StepTime(prefill=PrefillTime(tokens_per_s=1000, pair_s=1e-6), decode_s=0.03, decode_sequence_s=0.001)
    prompt = ScheduledSequence(0, 100, 50, samples=True)
    decodes = tuple(ScheduledSequence(i, 10, 1, samples=True) for i in (1, 2))
    assert time.of(SchedulerOutput(1, decodes)) == pytest.approx(0.032)
    assert time.of(SchedulerOutput(1, (prompt, *decodes))) == pytest.approx(0.032 + 0.05 + (5000 + 1275) * 1e-6)
    slow_start = replace(time, prefill_s=0.016)
    assert slow_start.of(SchedulerOutput(1, (prompt, *decodes))) == pytest.approx(0.048 + 0.05 + (5000 + 1275) * 1e-6)
    assert slow_start.of(SchedulerOutput(1, decodes)) == pytest.approx(0.032), "no prompt, no cost of one"
    moving = replace(time, move_s=0.02)
    assert moving.of(SchedulerOutput(1, decodes, moves_in=((0, 1), (1, 2)))) == pytest.approx(0.032 + 0.04), "first"
    assert moving.of(SchedulerOutput(1, decodes, moves_out=((0, 1),))) == pytest.approx(0.032), "meanwhile"
    assert moving.of(SchedulerOutput(1, decodes, moves_out=((0, 1), (1, 2)))) == pytest.approx(0.04)
    assert time.prefill.seconds(0, 150) == pytest.approx(time.prefill.seconds(0, 100) + time.prefill.seconds(100, 50))


def test_percentiles_are_nearest_rank() -> None:
    distribution = Distribution.of([float(i) for i in range(1, 101)])
    assert (distribution.p50, distribution.p90, distribution.p99, distribution.max) == (50.0, 90.0, 99.0, 100.0)
    assert Distribution.of([7.0]).p50 == 7.0


# Traces

MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 4, "hash_ids": [0, 2]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in MOONCAKE)
    return path


def test_mooncake_prompts_share_what_their_ids_share(mooncake: Path) -> None:
    first, second = read_trace(mooncake, "mooncake")
    assert (first.num_prompt_tokens, second.num_prompt_tokens, second.arrival_s) == (700, 1024, 1.5)
    assert first.prompt_token_ids()[:512] == second.prompt_token_ids()[:512]
    assert first.prompt_token_ids()[512] != second.prompt_token_ids()[512]
    config = replace(CONFIG, num_replicas=1)
    assert simulate(config, [first, second]).hit_rate == pytest.approx(512 / 1724)


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = speed_up(read_trace(path, "azure"), 2.0)
    assert second.arrival_s == pytest.approx(4.314579 / 2)
    assert (first.num_prompt_tokens, second.num_output_tokens) == (374, 109)
    assert set(first.prompt_token_ids()).isdisjoint(second.prompt_token_ids())


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": 70, "output_length": 3, "hash_ids": [0, 1]}',
    ],
)
def test_a_bad_trace_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl: request 2"):
        read_trace(path, "mooncake")
    assert len(read_trace(path, "mooncake", limit=1)) == 1


def test_no_such_trace() -> None:
    with pytest.raises(NotFound, match="nowhere"):
        read_trace(Path("nowhere"), "azure")


def test_the_command_prints_json_and_a_summary(mooncake: Path) -> None:
    app = typer.Typer()
    app.command()(sim)
    arguments = ["--trace", str(mooncake), "--replicas", "2", "--blocks-per-replica", "50"]
    run = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    told = json.loads(run.output)
    assert told["num_finished"] == 2
    settings = told["settings"]
    assert (settings["trace"], settings["speed"], settings["seed"]) == (mooncake.name, 1.0, 0)
    assert (settings["num_replicas"], settings["cache"]["num_blocks"]) == (2, 50)
    assert settings["objective"] == {"prefill_factor": 2.0, "ttft_s": 2.0}
    faults = ["crash:0@1+2", "stall:1@1+2", "slow:1@5+6x2"]
    more = ["--requests", "1", "--repeat", "2", *(part for fault in faults for part in ("--fault", fault))]
    settings = json.loads(CliRunner().invoke(app, [*arguments, "--json", *more], catch_exceptions=False).output)[
        "settings"
    ]
    assert (settings["requests"], settings["repeat"], settings["faults"]) == (1, 2, faults)
    assert "2 finished, 0 shed" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    for wrong in (["--routing", "x"], ["--format", "x"], ["--speed", "0"], ["--scale", "2"], ["--scale", "9:3"]):
        with pytest.raises(ConfigError, match=wrong[0].strip("-")):
            CliRunner().invoke(app, [*arguments, *wrong], catch_exceptions=False)
    host = [*arguments, "--host-blocks", "7", "--host-rate", "5120", "--json"]
    settings = json.loads(CliRunner().invoke(app, host, catch_exceptions=False).output)["settings"]
    assert (settings["cache"]["num_host_blocks"], settings["step_time"]["move_s"]) == (7, 0.1)
    with pytest.raises(ConfigError, match="--host-blocks cannot be combined with --shared-pool"):
        CliRunner().invoke(app, [*arguments, "--host-blocks", "7", "--shared-pool"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--host-rate requires --host-blocks"):
        CliRunner().invoke(app, [*arguments, "--host-rate", "1e6"], catch_exceptions=False)
    for wrong in (["--plot", "x"], ["--scale", "1:2"]):
        with pytest.raises(ConfigError, match=f"{wrong[0]} cannot be combined with --find-capacity"):
            CliRunner().invoke(app, [*arguments, *wrong, "--find-capacity"], catch_exceptions=False)


@pytest.fixture
def rush(tmp_path: Path) -> Path:
    """Four hundred prompts of 4 000 tokens, half a second each, five a second."""
    path = tmp_path / "rush.jsonl"
    lines = [
        {"timestamp": 200 * i, "input_length": 4000, "output_length": 20, "hash_ids": [*range(8 * i, 8 * i + 8)]}
        for i in range(400)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_scales_sheds_and_takes_prices(rush: Path) -> None:
    app = typer.Typer()
    app.command()(sim)

    def told(*more: str) -> dict[str, float]:
        arguments = ["--trace", str(rush), "--replicas", "1", "--json", *more]
        return json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).output)  # type: ignore[no-any-return]

    plain, scaled, slowly = told(), told("--scale", "1:9", "--startup", "2"), told("--scale", "1:9", "--startup", "60")
    assert plain["num_replicas_peak"] == 1
    assert 1 < scaled["num_replicas_peak"] <= 9
    assert scaled["goodput"] > slowly["goodput"] > plain["goodput"]
    assert plain["replica_s"] == pytest.approx(plain["duration_s"])
    assert told("--shed-late")["num_shed"] > plain["num_shed"] == 0
    assert told("--prefill-price", "1", "--decode-price", "0", "--requests", "50")["num_finished"] == 50
    with pytest.raises(ConfigError, match="--shed-late requires --hold"):
        told("--shed-late", "--routing", "round_robin")
    with pytest.raises(ConfigError, match="--startup requires --scale"):
        told("--startup", "5")
    for price in ("--prefill-price", "--decode-price"):
        with pytest.raises(ConfigError, match=f"{price} cannot be combined with --routing round_robin"):
            told("--routing", "round_robin", price, "1")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_search_shows_how_far_each_run_is(rush: Path, ahead: bool) -> None:
    seen: list[int] = []
    requests, tried = read_trace(rush, "mooncake", 50), list[float]()
    config = SimConfig(num_replicas=1, cache=CacheConfig(num_blocks=1000, block_size=512))
    find_capacity(config, requests, on_probe=lambda speed, _: tried.append(speed), tell=seen.append, ahead=ahead)
    assert seen.count(0) >= len(tried) if not ahead else seen
    assert max(seen) == 50, "one that is carried runs to its end"


def test_a_capacity_is_told_as_a_speed_of_the_trace(rush: Path) -> None:
    app = typer.Typer()
    app.command()(sim)
    found = []
    for speed in ("1", "4"):
        arguments = ["--trace", str(rush), "--requests", "100", "--replicas", "1", "--speed", speed]
        arguments += ["--find-capacity", "--json"]
        told = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
        assert told["settings"]["speed"] == float(speed)
        found.append(told["capacity"])
    assert 0 < found[0] == pytest.approx(found[1], rel=0.05)


def test_events_come_in_order_of_time_then_as_set_but_for_those_that_come_last() -> None:
    loop, come = EventLoop(), list[tuple[str, float]]()

    def event(name: str) -> Callable[[], None]:
        return lambda: come.append((name, loop.now))

    loop.at(1.0, event("last"), last=True)
    loop.at(1.0, event("first"))
    loop.at(1.0, lambda: (event("second")(), loop.after(0.0, event("third")), loop.at(1.0, event("end"), last=True)))  # type: ignore[func-returns-value]
    loop.at(2.0, event("later"))
    loop.at(0.5, event("before"))
    loop.run_until(1.0)
    assert (come, loop.now) == ([("before", 0.5)], 1.0)
    loop.run_until(2.0)
    assert [name for name, _ in come] == ["before", "first", "second", "third", "last", "end"]
    loop.run()
    assert come[-1] == ("later", 2.0)
    assert loop.num_events == len(come)
    with pytest.raises(ValueError, match=r"it is 2\.0 already"):
        loop.at(1.5, event("too late"))


def run(requests: list[SimRequest], num_host_blocks: int) -> tuple[str, int]:
    step_time = StepTime(step_s=0.001, decode_sequence_s=0.0005, decode_context_s=1e-6, move_s=0.1)
    cache = replace(CONFIG.cache, num_blocks=60, num_host_blocks=num_host_blocks)
    cluster = SimCluster(replace(CONFIG, cache=cache, step_time=step_time))
    for request in requests:
        cluster.arrive(request)
    cluster.loop.run()
    check_conservation(cluster)
    return report(cluster).to_json(), cluster.loop.num_events


@pytest.mark.parametrize("num_host_blocks", [0, 500])
def test_stretches_of_decodes_are_many_steps_at_once(num_host_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulating them one by one gives the same report, to the last bit; a move out takes longer than a decode."""
    requests = shared_prefixes(
        requests_per_s=2.0,
        num_requests=60,
        num_groups=5,
        num_prefix_tokens=700,
        num_own_tokens=90,
        num_output_tokens=150,
        seed=3,
    )
    at_once, num_events = run(requests, num_host_blocks)
    monkeypatch.setattr(SteadyScheduler, "num_steady_steps", lambda self, output, limit: 1)
    one_by_one, num_single_events = run(requests, num_host_blocks)
    assert at_once == one_by_one
    assert num_events < 0.5 * num_single_events


def test_hashes_of_runs_are_equal_where_prompts_are() -> None:
    first = SimRequest("a", 0.0, ((1, 40), (2, 30), (3, 7)), 1)
    same_start = SimRequest("b", 0.0, ((1, 40), (2, 24), (4, 20)), 1)
    assert len(first.block_hashes(16)) == 4
    assert first.block_hashes(16) == same_start.block_hashes(16)[:4]
    assert set(first.block_hashes(32)).isdisjoint(SimRequest("c", 0.0, ((1, 31), (2, 46)), 1).block_hashes(32))


def test_rounds_of_a_trace_share_nothing_with_one_another() -> None:
    once = shared_prefixes(
        requests_per_s=4.0,
        num_requests=20,
        num_groups=2,
        num_prefix_tokens=64,
        num_own_tokens=10,
        num_output_tokens=4,
        seed=3,
    )
    thrice = repeat(once, 3)
    assert thrice[:20] == once
    assert len({r.request_id for r in thrice}) == 60
    assert [r.arrival_s for r in thrice] == sorted(r.arrival_s for r in thrice)
    assert (thrice[-1].arrival_s - once[-1].arrival_s) / 2 == pytest.approx(once[-1].arrival_s * 21 / 20)
    hashes = [{h for r in thrice[i : i + 20] for h in r.block_hashes(16)} for i in (0, 20, 40)]
    assert len(set.union(*hashes)) == sum(map(len, hashes)) == 3 * len(hashes[0])
    config = replace(CONFIG, num_replicas=1)
    alone, together = simulate(config, once), simulate(config, thrice)
    assert together.num_finished == 60
    assert together.hit_rate == pytest.approx(alone.hit_rate, abs=0.02)
    assert repeat([], 3) == []
