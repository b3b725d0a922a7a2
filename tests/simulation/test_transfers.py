"""Simulated replicas take over each other's cached blocks; ``run`` always checks that nothing is lost or left held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.transfer_pace import START_S
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.faults import Crash, Fault, Stall
from shoal_cluster.sim.parallel import run_beside
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError

BLOCK_S = 0.001
CONFIG = SimConfig(
    num_replicas=2,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
    routing="round_robin",
    transfer_s=BLOCK_S,
)
HELD = replace(
    CONFIG,
    num_replicas=4,
    routing="predicted_ttft",
    scheduler=replace(CONFIG.scheduler, policy="deadline"),
    hold=HoldConfig(),
)


def chats(requests_per_s: float = 8.0, num_requests: int = 200, num_groups: int = 16) -> list[SimRequest]:
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=num_groups,
        num_prefix_tokens=1024,
        num_own_tokens=100,
        num_output_tokens=20,
        seed=1,
    )


def one_after_another(count: int) -> list[SimRequest]:
    """The same prompt of 1 025 tokens, every ten seconds."""
    return [SimRequest(f"request-{n}", 10.0 * n, ((7, 1025),), 4) for n in range(count)]


def test_a_prompt_that_another_replica_has_computed_takes_as_long_as_its_blocks() -> None:
    cluster = run(SimCluster(CONFIG), one_after_another(3))
    first, second, third = (o.first_token_s - o.arrival_s for o in cluster.book.outcomes.values() if o.first_token_s)
    assert second - third == pytest.approx(START_S + 16 * BLOCK_S)
    assert second < first / 2
    assert [o.num_cached_tokens for o in cluster.book.outcomes.values()] == [0, 1024, 1024]
    told = report(cluster)
    assert told.transfer_rate == pytest.approx(1024 / (3 * 1025))
    assert "copied from other replicas" in told.summary()


@pytest.mark.parametrize("transfer_s", [None, 0.1])
def test_without_transfers_or_by_slow_ones_it_is_computed(transfer_s: float | None) -> None:
    first, second, _ = one_after_another(3)
    other = replace(first, request_id="other", prompt_runs=((8, 1025),))
    pace_known = [first, other, *(replace(r, arrival_s=r.arrival_s + 20.0) for r in (second, first, other))]
    requests = [replace(r, request_id=str(n)) for n, r in enumerate(sorted(pace_known, key=lambda r: r.arrival_s))]
    assert simulate(replace(CONFIG, transfer_s=transfer_s), requests).transfer_rate == 0.0


def test_transfers_bring_hits_where_prompts_go_to_replicas_that_have_not_computed_them() -> None:
    with_, without = (simulate(replace(CONFIG, transfer_s=s), chats(num_groups=4)) for s in (BLOCK_S, None))
    assert with_.transfer_rate == pytest.approx(4 * 1024 / (200 * 1124))  # each of the four prefixes once
    assert with_.hit_rate == pytest.approx(without.hit_rate + with_.transfer_rate)
    assert with_.ttft_s.mean < without.ttft_s.mean


@pytest.mark.parametrize("requests", [chats(60.0), chats(120.0)])
def test_two_processes_report_as_one_does(requests: list[SimRequest]) -> None:
    alone = simulate(HELD, requests)
    assert alone.transfer_rate > 0
    cluster = SimCluster(HELD)
    for request in requests:
        cluster.arrive(request)
    run_beside(cluster)
    check_conservation(cluster)
    assert report(cluster).to_json() == alone.to_json() == simulate(HELD, requests).to_json()


@pytest.mark.parametrize(
    "fault", [Crash("replica-0000", 3.0, 6.0), Stall("replica-0001", 2.0, 5.0), Crash("replica-0001", 10.001, 12.0)]
)
@pytest.mark.parametrize("config", [HELD, CONFIG])
def test_whatever_fails_meanwhile_nothing_is_lost(config: SimConfig, fault: Fault) -> None:
    told = simulate(replace(config, faults=(fault,), num_gateways=2, transfer_s=0.02), chats(12.0))
    assert told.num_finished == 200


def test_a_giver_that_crashes_meanwhile_gives_nothing() -> None:
    slow = replace(CONFIG, transfer_s=0.004, faults=(Crash("replica-0000", 10.03, 12.0),))
    cluster = run(SimCluster(slow), one_after_another(2))
    assert [o.num_cached_tokens for o in cluster.book.outcomes.values()] == [0, 0]
    assert report(cluster).transfer_rate == 0.0


def test_a_full_pool_takes_nothing_over() -> None:
    small = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=18))
    told = simulate(small, chats(20.0, num_groups=2))
    assert told.num_finished == 200


def test_the_command_names_a_rate_and_refuses_it_beside_a_shared_pool(tmp_path: Path) -> None:
    (trace := tmp_path / "trace.jsonl").write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]}\n'
    )
    app = typer.Typer()
    app.command()(sim)
    ran = CliRunner().invoke(app, ["--trace", str(trace), "--transfer-rate", "200000", "--json"])
    assert ran.exit_code == 0, ran.output
    assert '"transfer_s": 0.00256' in ran.stdout
    with pytest.raises(ConfigError, match="--transfer-rate cannot be combined with --shared-pool"):
        CliRunner().invoke(
            app, ["--trace", str(trace), "--transfer-rate", "2e5", "--shared-pool"], catch_exceptions=False
        )


def test_a_giver_goes_on_with_its_own_once_its_blocks_are_free() -> None:
    """Its pool is full of what another takes over: nothing else would wake it."""
    config = replace(
        HELD,
        num_replicas=2,
        cache=CacheConfig(num_blocks=4, block_size=512, enable_partial_reuse=False),
        transfer_s=512 / 500,
        prefill_share=0.5,
    )
    lengths = ((0.0, (512, 512, 512, 114), 3), (0.32, (512, 107), 1), (0.394, (512, 512, 512, 24), 1))
    requests = [
        SimRequest(f"request-{n}", arrival_s, tuple((10 * n + i, count) for i, count in enumerate(counts)), num_output)
        for n, (arrival_s, counts, num_output) in enumerate(lengths)
    ]
    cluster = SimCluster(config)
    for request in requests:
        cluster.arrive(request)
    cluster.loop.run_until(60.0)
    assert cluster.book.num_open == 0


@pytest.mark.parametrize("seed", range(12))
def test_small_pools_that_give_blocks_away_come_to_an_end(seed: int) -> None:
    rng = Random(seed)
    config = replace(
        HELD,
        num_replicas=rng.randint(2, 4),
        cache=CacheConfig(num_blocks=rng.randint(4, 20), block_size=64, enable_partial_reuse=False),
        transfer_s=rng.choice((0.001, 0.05, 0.5)),
        prefill_share=rng.choice((0.0, 0.5)),
        seed=seed,
    )
    cluster, num_tokens = SimCluster(config), 64 * (config.cache.num_blocks - 2)
    for number in range(60):
        own = (1000 + number, rng.randint(1, num_tokens // 2))
        runs = ((rng.randrange(4), 64 * (num_tokens // 128)), own)
        cluster.arrive(SimRequest(f"request-{number}", number * 0.05, runs, rng.randint(1, 20)))
    cluster.loop.run_until(2000.0)
    assert cluster.book.num_open == 0
    check_conservation(cluster)
