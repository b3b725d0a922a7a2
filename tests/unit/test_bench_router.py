"""The router benchmark runs, and the index stays within the promised memory."""

from __future__ import annotations

import json
from random import Random

from typer.testing import CliRunner

from shoal_cluster.cli import app
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

MAX_BYTES_PER_ENTRY = 60


def test_reports_times_and_memory() -> None:
    options = ["--replicas", "8", "--blocks", "200000", "--requests", "50", "--tenants", "7", "--json"]
    run = CliRunner().invoke(app, ["bench", "router", *options])
    assert run.exit_code == 0, run.output
    cost = json.loads(run.output)
    assert (cost["num_replicas"], cost["num_requests"], cost["num_tenants"]) == (8, 50, 7)
    assert cost["num_updates"] >= 50
    assert 0 < cost["decision_p50_us"] <= cost["decision_p99_us"] <= cost["decision_max_us"]
    assert cost["matched_blocks_mean"] > 20
    assert cost["index_forgotten_share"] == 0


def test_places_one_after_the_other_of_those_that_are_held() -> None:
    options = ["--replicas", "4", "--blocks", "20000", "--requests", "60", "--held", "40", "--json"]
    run = CliRunner().invoke(app, ["bench", "router", *options])
    assert run.exit_code == 0, run.output
    cost = json.loads(run.output)
    assert cost["num_held"] == 40
    assert cost["num_updates"] >= 30
    assert 0 < cost["decision_p50_us"] <= cost["decision_p99_us"]


def test_a_million_entries_take_what_is_promised() -> None:
    index, rng = PrefixIndex(), Random(0)
    for number in range(64):
        index.store(f"replica-{number}", [BlockHash(rng.randbytes(DIGEST_BYTES)) for _ in range(2**14)])
    assert len(index) > 0.999 * 2**20
    assert index.num_bytes <= MAX_BYTES_PER_ENTRY * len(index)
