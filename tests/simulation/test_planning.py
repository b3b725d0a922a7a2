"""Capacity, ceilings, several gateways, late binding and fitted step times, on small made-up workloads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import typer
from fixtures.cluster_views import make_stats
from msgspec import structs
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_cluster.sim.capacity import carries, find_capacity, find_replicas
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.faults import Stall
from shoal_cluster.sim.fit import fit_live, fit_step_time
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.run import run, simulate
from shoal_cluster.sim.traces import read_trace
from shoal_cluster.sim.workload import SimRequest, poisson, shared_prefixes, speed_up
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.executor import ScheduledSequence, SchedulerOutput
from shoal_replica.stats import ReplicaStats

PREFILL = PrefillTime(tokens_per_s=8000.0)
OBJECTIVE = LatencyObjective(ttft_s=0.5)
PLACED = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
    step_time=StepTime(prefill=PREFILL, decode_s=0.005),
    objective=OBJECTIVE,
)
HELD = replace(
    PLACED,
    scheduler=replace(PLACED.scheduler, policy="deadline"),
    hold=HoldConfig(objective=OBJECTIVE, prefill=PREFILL),
)


def mixed(num_requests: int = 300, seed: int = 5) -> list[SimRequest]:
    """Many short prompts that share prefixes, and among them long ones that block a queue for half a second."""
    short = shared_prefixes(
        requests_per_s=20.0,
        num_requests=num_requests,
        num_groups=12,
        num_prefix_tokens=512,
        num_own_tokens=200,
        num_output_tokens=10,
        seed=seed,
    )
    long = poisson(
        requests_per_s=2.0,
        num_requests=num_requests // 10,
        num_prompt_tokens=4000,
        num_output_tokens=10,
        seed=seed + 1,
    )
    return short + [replace(r, request_id=f"long-{r.request_id}") for r in long]


def test_held_requests_all_end_and_repeat_byte_for_byte() -> None:
    requests = speed_up(mixed(), 2.0)
    report = simulate(HELD, requests)
    assert report.num_finished == len(requests)
    assert simulate(HELD, requests).to_json() == report.to_json()
    assert report.predicted_hit_rate == pytest.approx(report.hit_rate, abs=0.01)


def test_late_binding_carries_more_than_the_rule_alone_and_that_more_than_turns() -> None:
    requests = mixed()
    capacities = [
        find_capacity(config, requests, tolerance=0.05)
        for config in (HELD, PLACED, replace(PLACED, routing="round_robin"))
    ]
    assert capacities[0] > 1.15 * capacities[1] > 1.15 * 1.05 * capacities[2]


def test_capacity_is_where_goodput_falls_below_the_goal() -> None:
    requests = mixed(150)
    probes: list[tuple[float, bool]] = []
    capacity = find_capacity(PLACED, requests, on_probe=lambda speed, ok: probes.append((speed, ok)))
    assert simulate(PLACED, speed_up(requests, capacity)).goodput >= 0.9
    assert min(speed for speed, ok in probes if not ok) <= capacity * 1.021
    assert max(speed for speed, ok in probes if ok) == capacity


def test_the_fewest_replicas_that_carry_it() -> None:
    requests = speed_up(mixed(150), 2.0)
    count = find_replicas(PLACED, requests)
    assert carries(replace(PLACED, num_replicas=count), requests, 0.9)
    assert not carries(replace(PLACED, num_replicas=count - 1), requests, 0.9)


def test_no_replicas_are_enough_for_an_objective_that_none_meets() -> None:
    tried: list[int] = []
    never = replace(PLACED, objective=LatencyObjective(ttft_s=1e-3, prefill_factor=0.0))
    assert find_replicas(never, mixed(20), on_probe=lambda count, ok: tried.append(count)) == 0
    assert tried == [1, 2, 4, 8, 16, 22]  # more replicas than one per request cannot help


def test_an_index_with_too_little_room_forgets_and_the_run_still_adds_up() -> None:
    """Some of its sets fill up long before the whole index does: they evict although there is room elsewhere."""
    cluster = SimCluster(HELD)
    view = cluster.gateways[0].view
    view.index = index = PrefixIndex(1024)
    for replica_id in view.replica_ids:
        index.slot(replica_id)  # the same slots as in the replaced index
    run(cluster, mixed(120))
    assert index.num_evicted
    assert len(index) < index.max_entries


def test_a_shared_pool_is_the_ceiling() -> None:
    """Every prefix is computed once in total, wherever requests go."""
    requests = mixed()
    shared = simulate(replace(PLACED, routing="round_robin", has_shared_pool=True), requests)
    apart = simulate(PLACED, requests)
    prompt_tokens = sum(r.num_prompt_tokens for r in requests)
    assert shared.hit_rate == pytest.approx((300 - 12) * 512 / prompt_tokens, rel=0.03)
    assert apart.hit_rate < shared.hit_rate


def test_several_gateways_see_what_the_others_promise() -> None:
    """Blind to one another, they would all send to the same replica at once."""
    requests = mixed(200)
    several = replace(HELD, num_gateways=8)
    report = simulate(several, requests)
    assert report.num_finished == len(requests)
    assert report.goodput > 0.9
    assert report.imbalance < 1.3
    assert simulate(several, requests).to_json() == report.to_json()


def test_heartbeats_in_a_long_step_take_back_no_promise() -> None:
    step = Stall("replica-0000", 0.5, 0.9)
    cluster = SimCluster(replace(HELD, num_replicas=1, num_gateways=2, heartbeat_s=0.03, faults=(step,)))
    seen: list[int] = []
    for request in (SimRequest("first", 0.6, ((1, 400),), 4), SimRequest("second", 0.62, ((2, 80),), 4)):
        cluster.book.expect(request)
        cluster.loop.at(request.arrival_s, lambda request=request: cluster.gateways[0].take(request))
    for look_s in (0.7, 0.8, 0.88):
        cluster.loop.at(look_s, lambda: seen.append(int(cluster.gateways[1].view.present(0.0).num_reserved.sum())))
    cluster.loop.run()
    assert seen == [1, 1, 1]


def test_lone_streams_do_not_pile_up_on_the_one_that_knows_their_prefix() -> None:
    """Eight chats with one system prompt and long answers; each sequence makes steps longer. Both replicas get some."""
    step_time = StepTime(prefill=PrefillTime(tokens_per_s=2000.0, pair_s=0.0), decode_s=0.007, decode_sequence_s=0.0012)
    chats = [SimRequest(f"chat-{i}", 1.0 + 0.3 * i, ((7, 600), (100 + i, 40)), 200) for i in range(8)]
    for hold in (None, HoldConfig(objective=OBJECTIVE, prefill=step_time.prefill)):
        config = replace(PLACED, num_replicas=2, step_time=step_time, hold=hold, cache=CacheConfig(num_blocks=2000))
        report = simulate(config, chats)
        assert min(report.busy_s.values()) > 0.25 * max(report.busy_s.values())


# Step times


def prompt_step(num_computed_tokens: int, num_new_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(1, (ScheduledSequence(0, num_computed_tokens, num_new_tokens, samples=False),))


@pytest.mark.parametrize(("prefill_s", "decode_s"), [(0.0, 0.005), (0.016, 0.0)])
def test_step_times_are_found_again_from_what_they_make(tmp_path: Path, prefill_s: float, decode_s: float) -> None:
    true = StepTime(
        prefill=PrefillTime(tokens_per_s=2000.0, pair_s=4e-8),
        step_s=0.002,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_sequence_s=0.0006,
        decode_context_s=2e-7,
    )
    steps = {
        "prefill": [
            {"num_new_tokens": n, "num_computed_tokens": c, "seconds": [true.of(prompt_step(c, n))] * 3}
            for n in (16, 256, 1024)
            for c in (0, 1024)
        ],
        "decode": [
            {"num_seqs": n, "context": c, "seconds": [true.decode(n, n * c), 1.0, 0.0]}
            for n in (1, 8, 64)
            for c in (64, 1024)
        ],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"steps": steps}))
    fitted = fit_step_time(path)
    assert fitted.prefill.tokens_per_s == pytest.approx(2000.0, rel=1e-3)
    assert fitted.prefill.pair_s == pytest.approx(4e-8, rel=1e-3)
    assert fitted.step_s == pytest.approx(0.002, rel=1e-2)
    assert fitted.prefill_s == pytest.approx(prefill_s, rel=1e-2, abs=1e-6)
    assert fitted.decode_s == pytest.approx(decode_s, rel=1e-2, abs=1e-6)
    assert fitted.decode_sequence_s == pytest.approx(0.0006, rel=1e-3)
    assert fitted.decode_context_s == pytest.approx(2e-7, rel=1e-2)


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": {"prefill": [], "decode": []}}'])
def test_a_benchmark_without_steps_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bench\.json holds no steps .*shoal bench engine --workloads s --json"):
        fit_step_time(path)
    with pytest.raises(NotFound):
        fit_step_time(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": [-1]}, "seconds: got -1; must be above 0"),
        ({"seconds": [float("nan")]}, "seconds: got nan; must be above 0"),
        ({"num_new_tokens": 0}, "num_new_tokens: got 0; must be at least 1"),
        ({"num_computed_tokens": -5}, "num_computed_tokens: got -5; must be at least 0"),
        ({"num_new_tokens": 10**400}, "OverflowError"),
    ],
)
def test_steps_that_cannot_be_are_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    prefill = [{"num_new_tokens": n, "num_computed_tokens": 0, "seconds": [n / 1000]} for n in (64, 128, 256)]
    decode = [{"num_seqs": n, "context": 100, "seconds": [0.01 + n / 1000]} for n in (1, 2, 4)]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"steps": {"prefill": [*prefill, prefill[0] | change], "decode": decode}}))
    with pytest.raises(ConfigError, match=rf"^model_from: bench\.json holds no steps \(.*{says}"):
        fit_step_time(path)


@pytest.mark.parametrize("share_guessed", [0.0, 0.25])
def test_step_times_are_found_again_from_what_replicas_tell(share_guessed: float) -> None:
    """Where every fourth token was guessed, there are three steps for four of a sequence's tokens."""
    true, rng = StepTime(prefill=PrefillTime(tokens_per_s=500.0, pair_s=0.0), step_s=0.02), Random(0)
    told: list[tuple[ReplicaStats, ReplicaStats]] = []
    before = make_stats()
    for _ in range(40):
        steps, new, generated = rng.randrange(20), rng.randrange(300), 4 * rng.randrange(15)
        after = structs.replace(
            before,
            num_steps=before.num_steps + steps,
            num_prompt_tokens=before.num_prompt_tokens + 512 + new,
            num_cached_tokens=before.num_cached_tokens + 512,
            num_generated_tokens=before.num_generated_tokens + generated,
            num_accepted_tokens=before.num_accepted_tokens + int(share_guessed * generated),
            busy_s=before.busy_s + steps * true.step_s + new / 500.0 + generated * 0.003,
        )
        told.append((before, after))
        before = after
    is_left_out = structs.replace(before, num_waiting=1, num_generated_tokens=before.num_generated_tokens + 9999)
    fitted = fit_live([*told, (before, is_left_out)])
    assert fitted.step_s == pytest.approx((1 - share_guessed) * 0.02, rel=1e-3)
    assert fitted.prefill.tokens_per_s == pytest.approx(500.0, rel=1e-3)
    assert (fitted.decode_s, fitted.decode_sequence_s) == (0.0, pytest.approx(0.003, rel=1e-3))
    with pytest.raises(ConfigError, match="intervals with steps"):
        fit_live(told[:5])


@pytest.mark.parametrize("varying", ["nothing", "steps", "steps and outputs"])
def test_step_times_are_not_made_up_from_intervals_that_are_alike(varying: str) -> None:
    """Nor is the time of a prompt token, where there was no prompt."""
    told = []
    for i in range(12):
        steps = 10 if varying == "nothing" else 10 + i
        generated = 30 + i * i if varying == "steps and outputs" else 3 * steps
        after = structs.replace(make_stats(), num_steps=steps, num_generated_tokens=generated, busy_s=0.03 * steps)
        told.append((make_stats(), after))
    with pytest.raises(ConfigError, match="too alike"):
        fit_live(told)


# The command


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{500 + i},{5 + i % 3},0\n" for i in range(40))
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens\n" + rows)
    return path


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(sim)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).stdout


def test_lengths_come_once_a_second_the_same_each_time(lengths: Path) -> None:
    requests = read_trace(lengths, "lengths")
    assert requests == read_trace(lengths, "lengths")
    assert requests[-1].arrival_s == pytest.approx(40, rel=0.5)
    assert (requests[3].num_prompt_tokens, requests[3].num_output_tokens) == (503, 5)


def test_the_command_plans_and_draws(lengths: Path, tmp_path: Path) -> None:
    one = ["--trace", str(lengths), "--format", "lengths", "--blocks-per-replica", "20", "--json"]
    small = [*one, "--replicas", "2"]
    capacity = json.loads(invoke(*small, "--find-capacity"))["capacity"]
    assert capacity > 1
    least = json.loads(invoke(*one, "--find-replicas", "--speed", str(capacity * 0.98)))
    assert least["replicas"] == 2
    assert "num_replicas" not in least["settings"]
    report = json.loads(invoke(*small, "--plot", str(tmp_path / "plots"), "--gateways", "2", "--seconds", "20"))
    assert 0 < report["num_finished"] < 40
    assert all((tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in ("latency.png", "load.png"))
    slow = json.loads(invoke(*small, "--model-rate", "100,0,0.1", "--no-hold"))
    assert slow["ttft_s"]["p50"] > 10 * report["ttft_s"]["p50"]


def test_the_command_scales_by_the_objective_that_is_given(lengths: Path) -> None:
    scaled = ["--trace", str(lengths), "--format", "lengths", "--requests", "1", "--scale", "1:2", "--json"]
    plan = json.loads(invoke(*scaled, "--ttft", "0.5"))["settings"]["scaling"]
    assert plan["config"]["ttft_objective_s"] == 0.5


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["--find-capacity", "--find-replicas"], "--find-replicas cannot be combined with --find-capacity: choose one"),
        (["--hold", "--routing", "round_robin"], "--hold cannot be combined with --routing round_robin"),
        (["--model-rate", "1,2"], "model_rate"),
        (["--model-rate", "1,2,3", "--model-from", "x"], "--model-from cannot be combined with --model-rate"),
        (["--model-rate", "1e-5,0,0"], r"tokens_per_s: got 1e-05; must be at least 1"),
        (["--model-rate", "8000,1,0"], r"pair_s: got 1\.0; must be at most 1e-05"),
        (["--model-rate", "8000,0,1e9"], r"decode_s: got 1000000000\.0; must be between 0 and 3600"),
        (["--order", "x"], "order"),
        (["--goodput", "0", "--find-capacity"], "goodput"),
        (["--goodput", "0.9"], "--goodput requires --find-capacity or --find-replicas: a single run has no goal"),
        (["--replicas", "4", "--find-replicas"], "--replicas cannot be combined with --find-replicas: the search sets"),
        (["--scale", "1:4", "--ttft", "5000"], r"ttft: got 5000\.0; must be from 0\.01 to 3600 with --scale"),
        (["--scale", "1:4", "--shared-pool"], "--shared-pool cannot be combined with --scale"),
        (["--seconds", "inf"], "seconds: got inf; must be finite"),
        (["--fault", f"stall:0@{'9' * 400}+5"], "fault: got one from 9+ s .* must be at most"),
    ],
)
def test_wrong_options_are_named(lengths: Path, wrong: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        invoke("--trace", str(lengths), "--format", "lengths", *wrong)
