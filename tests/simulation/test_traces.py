"""Traces as users have them: what is read, and what is refused, naming the place and the limit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from shoal_cluster.commands.sim import sim
from shoal_cluster.sim.capacity import MAX_SPEED
from shoal_cluster.sim.traces import MAX_TOKENS, read_trace
from shoal_cluster.sim.workload import MAX_ARRIVAL_S, repeat, speed_up
from shoal_replica.errors import ConfigError

ROW = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}


def written(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": float("nan")}, "timestamp: got nan; must be a finite number"),
        ({"timestamp": float("inf")}, "timestamp: got inf; must be a finite number"),
        ({"timestamp": 10**400}, "OverflowError"),
        ({"input_length": 0, "hash_ids": []}, f"input_length: got 0; must be 1 to {MAX_TOKENS}"),
        ({"input_length": MAX_TOKENS + 1}, f"input_length: got {MAX_TOKENS + 1}; must be"),
        ({"input_length": 700.5}, "input_length: got 700.5; must be a whole number"),
        ({"output_length": True}, "output_length: got True; must be a whole number"),
        ({"hash_ids": "ab"}, "hash_ids: got 'ab'; must be a list"),
        ({"output_length": -1}, "output_length: got -1; must be 0 to"),
        ({"output_length": float("inf")}, "OverflowError"),
        ({"hash_ids": [[0], [1]]}, r"hash_ids: got \[0\]; must be numbers or strings"),
        ({"hash_ids": [float("nan"), 1]}, "hash_ids: got nan; must be numbers or strings"),
        ({"timestamp": "1"}, "timestamp: got '1'; must be a finite number"),
        ({"timestamp": True}, "timestamp: got True; must be a finite number"),
        ({"output_length": None}, "output_length: got None; must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = written(tmp_path / "trace.jsonl", [ROW, {**ROW, **change}])
    with pytest.raises(ConfigError, match=rf"^trace: trace\.jsonl: request 2 is not of format 'mooncake' \(.*{says}"):
        read_trace(path, "mooncake")


def test_times_count_from_the_first_arrival(tmp_path: Path) -> None:
    """Logs have times since some epoch, in any order; a trace may begin before its zero."""
    for first in (-5_000, 0, 1_790_000_000_000):
        rows = [{**ROW, "timestamp": first + ms} for ms in (2_500, 0, 40)]
        requests = read_trace(written(tmp_path / "trace.jsonl", rows), "mooncake")
        assert [(r.request_id, pytest.approx(r.arrival_s, abs=1e-6)) for r in requests] == [
            ("request-1", 0.0),
            ("request-2", 0.04),
            ("request-0", 2.5),
        ]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50,10,4\n2023-11-16 18:15:46,20,0\n",
    )
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(azure, "azure")] == [
        (0.0, 20, 1),
        (4.0, 10, 4),
    ]


def test_ids_may_be_any_hashes(tmp_path: Path) -> None:
    rows = [{**ROW, "hash_ids": ids} for ids in (["a", 2**70], ["a", -3], [7, 2**70])]
    first, second, third = (r.prompt_token_ids() for r in read_trace(written(tmp_path / "t.jsonl", rows), "mooncake"))
    assert first[:512] == second[:512] != third[:512]
    assert first[512:] == third[512:] != second[512:]


def test_blank_lines_and_byte_order_marks_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\ufeff{json.dumps(ROW)}\r\n\n  \n{json.dumps(ROW)}\n\n", encoding="utf-8")
    assert len(read_trace(path, "mooncake")) == 2
    path.write_text("\ufeffnum_prefill_tokens,num_decode_tokens\r\n5,6\r\n\r\n7,8\r\n", encoding="utf-8")
    assert [r.num_prompt_tokens for r in read_trace(path, "lengths")] == [5, 7]


def test_a_file_that_is_damaged_or_empty_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(("".join(json.dumps({**ROW, "timestamp": i}) + "\n" for i in range(2_000))).encode())
    path, rng = tmp_path / "trace.jsonl.gz", Random(0)
    damaged = bytearray(whole)
    for place in range(len(whole) // 2, len(whole) // 2 + 40):
        damaged[place] = rng.randrange(256)
    for data in (whole[: len(whole) // 2], bytes(damaged), b"no archive"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"^trace: trace\.jsonl\.gz"):
            read_trace(path, "mooncake")
    empty = written(tmp_path / "empty.jsonl", [])
    for trace_format in ("mooncake", "azure", "lengths"):
        with pytest.raises(ConfigError, match=r"^trace: empty\.jsonl has no requests"):
            read_trace(empty, trace_format)  # type: ignore[arg-type]


def test_what_would_never_end_is_refused(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "timestamp": 2_000.0 * MAX_ARRIVAL_S}]
    requests = read_trace(written(tmp_path / "trace.jsonl", rows), "mooncake")
    assert speed_up(requests, 2.0)[-1].arrival_s == MAX_ARRIVAL_S
    with pytest.raises(ConfigError, match="trace: its last request comes after"):
        speed_up(requests, 1.9)
    for speed in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="speed: got"):
            speed_up(requests, speed)
    with pytest.raises(ConfigError, match="repeat: got 10000000 times 2 requests; must be at most 10000000 in all"):
        repeat(requests, 10_000_000)


def test_searches_say_where_they_end(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(sim)
    arguments = ["--trace", str(written(tmp_path / "trace.jsonl", [ROW])), "--speed", "2"]

    def told(*more: str) -> str:
        return CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).stdout

    assert told("--find-replicas") == "1 replica carries it\n"
    assert told("--find-capacity") == "2048.000 times the trace's speed is carried, and no more was tried\n"
    assert json.loads(told("--find-capacity", "--json"))["capacity"] == 2 * MAX_SPEED


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    app, trace, file = typer.Typer(), written(tmp_path / "trace.jsonl", [ROW]), tmp_path / "file"
    app.command()(sim)
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"^plot: got '.*file"):
            CliRunner().invoke(app, ["--trace", str(trace), "--plot", str(folder)], catch_exceptions=False)


def test_a_line_of_too_many_brackets_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="request 1 is not of format 'mooncake'"):
        read_trace(tmp_path / "deep.jsonl", "mooncake")


def test_a_trace_of_a_day_is_not_slowed_down_beyond_a_year(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "timestamp": 86_400_000}]
    app = typer.Typer()
    app.command()(sim)
    arguments = ["--trace", str(written(tmp_path / "day.jsonl", rows)), "--replicas", "1", "--blocks-per-replica", "1"]
    found = CliRunner().invoke(app, [*arguments, "--find-capacity", "--json"], catch_exceptions=False)
    assert json.loads(found.stdout)["capacity"] == 0


def test_who_comes_up_when_all_is_over_counts_for_nothing(tmp_path: Path) -> None:
    rows = [{**ROW, "timestamp": 100 * number, "hash_ids": [number, -1 - number]} for number in range(60)]
    app = typer.Typer()
    app.command()(sim)
    arguments = [
        "--trace",
        str(written(tmp_path / "trace.jsonl", rows)),
        "--replicas",
        "1",
        "--model-rate",
        "3000,0,0.1",
    ]
    found = CliRunner().invoke(
        app, [*arguments, "--scale", "1:16", "--startup", "5000", "--json"], catch_exceptions=False
    )
    report = json.loads(found.stdout)
    assert (report["num_replicas_peak"], report["imbalance"], len(report["busy_s"])) == (1, 1.0, 1)
    assert report["utilization"] > 0.9


def test_who_comes_while_the_last_replica_drains_is_held_for_the_next(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(sim)
    shed = []
    for late_ms in range(0, 8, 2):
        rows = [ROW, {**ROW, "timestamp": 301_000 + late_ms}]
        arguments = ["--trace", str(written(tmp_path / "trace.jsonl", rows)), "--replicas", "1", "--scale", "0:2"]
        found = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        shed.append(json.loads(found.stdout)["num_shed"])
    assert shed == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["2024-05-10 00:00:00.0,5.0,7"], "ContextTokens: got '5.0'; must be a whole number"),
        (["2024-05-10 00:00:00.0,5"], "GeneratedTokens: got None; must be a whole number"),
        (["yesterday,5,7"], "TIMESTAMP: got 'yesterday'"),
        (["2024-05-10 00:00:00,5,7", "2024-05-10 00:00:00+00:00,5,7"], "TIMESTAMP: got '2024-05-10 00:00:00.00:00'"),
    ],
)
def test_what_is_wrong_with_a_row_of_azures_is_said(tmp_path: Path, rows: list[str], says: str) -> None:
    (path := tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    with pytest.raises(ConfigError, match=rf"^trace: trace\.csv: request {len(rows)} is not of .*{says}"):
        read_trace(path, "azure")
