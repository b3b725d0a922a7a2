"""The `shoal` command against a scripted core behind a real gRPC server; and how little it imports at its start."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.fake_gateway import ADAPTER, ADMIN_KEY, MODEL, START_REPORT, FakeGateway
from fixtures.live_cluster import free_address
from typer.testing import CliRunner

from shoal_cluster.cli import LATER, app
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.grpc_service import start_grpc_server
from shoal_replica.errors import Unavailable

WIDE = {"COLUMNS": "200"}


@pytest.fixture
def core() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def address(core: FakeGateway) -> Iterator[str]:
    """The core, served from a thread of its own, since commands run an event loop themselves."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = start_grpc_server(core, "127.0.0.1:0", max_call_s=60)
    server, port = asyncio.run_coroutine_threadsafe(starting, loop).result(10)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_generate_streams_an_answer_and_its_stats(core: FakeGateway, address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--address", address, "--seed", "7", "--temperature", "0"])
    assert (result.exit_code, result.stdout) == (0, f"{core.text}\n")
    (call,) = core.calls
    assert call.messages is not None
    assert [(m.role, m.content) for m in call.messages] == [("user", "hi")]
    assert (call.sampling_params.seed, call.sampling_params.temperature) == (7, 0.0)
    for words in (call.request_id, "replica r0", "2 cached", "TTFT 125 ms", "tok/s"):
        assert words in result.stderr


def test_generate_raw_without_stats(core: FakeGateway, address: str) -> None:
    arguments = ["generate", "hi", "--address", address, "--raw", "--no-stats", "--max-tokens", "1"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "H\n", "")
    assert (core.calls[0].text, core.calls[0].messages) == ("hi", None)


def test_chat_remembers(core: FakeGateway, address: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--address", address, "--system", "s"], input="one\n\ntwo\n")
    assert result.exit_code == 0
    messages = core.calls[-1].messages
    assert messages is not None
    assert [m.role for m in messages] == ["system", "user", "assistant", "user"]
    assert [m.content for m in messages] == ["s", "one", core.text, "two"]


def test_a_chat_survives_an_error(core: FakeGateway, address: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--address", address, "--no-stats"], input=f"{'x' * 500}\ntwo\n")
    assert result.exit_code == 0
    assert "below 128 tokens" in result.stderr
    messages = core.calls[-1].messages
    assert messages is not None
    assert [m.content for m in messages] == ["two"]


def test_status_shows_ledgers_and_sums(address: str) -> None:
    result = CliRunner().invoke(app, ["status", "--address", address], env=WIDE)
    assert "first token, last 3 requests: p50 0.20 s, p99 0.40 s" in result.stdout
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["r0"][1:9] == ["ready", "30", "20", "70", "100", "30%", "3", "2"]
    assert lines["r1"][1:3] == ["silent", "-"]
    assert lines["cluster"][1:7] == ["30", "20", "70", "100", "30%", "3"]


def test_status_shows_what_is_asked_for(address: str) -> None:
    rows = CliRunner().invoke(app, ["status", "--address", address], env=WIDE).output.splitlines()
    assert [row.split() for row in rows if row.split()[:1] in ([MODEL], [ADAPTER])][-2:] == [
        [MODEL, "2", "5", "40", "25%", "12"],
        [ADAPTER, "1", "4", "30", "0%", "9"],
    ]


def test_status_shows_what_memory_went_to(address: str) -> None:
    result = CliRunner().invoke(app, ["status", "--replicas", "--address", address], env=WIDE)
    assert f"r0  {START_REPORT}\n" in result.stdout
    assert "r1  has not said\n" in result.stdout


def test_status_as_json(address: str) -> None:
    body = json.loads(CliRunner().invoke(app, ["status", "--json", "--address", address]).stdout)
    assert body["blocks"]["num_total_blocks"] == 100
    assert body["blocks"]["utilization"] == body["replicas"][0]["stats"]["utilization"] == 0.3
    assert body["replicas"][1]["stats"] is None


def test_explain_shows_terms_and_reason(address: str) -> None:
    result = CliRunner().invoke(app, ["explain", "asked", "--address", address], env=WIDE)
    assert result.exit_code == 0
    for words in ("score", "prefill", "free_blocks", "age_s", "not connected", "r0: least cost"):
        assert words in result.stdout
    assert "by predicted_ttft, prefill_price 6.5, decode_price 640, seed " in result.stdout
    assert "taken again from the record: the same choice" in " ".join(result.stdout.split())
    assert "asked: sent to r0, due in 0.40 s; more urgent, but better off waiting: first (for r0)" in result.stdout


def test_explain_as_json(address: str) -> None:
    result = CliRunner().invoke(app, ["explain", "asked", "--json", "--address", address])
    record, text = json.loads(result.stdout)
    assert [c["rank"] for c in record["candidates"]] == [1, None]
    assert 0.0 <= record["candidates"][0]["age_s"] < 3600.0
    assert record["by"].startswith("predicted_ttft, ")
    assert text["text"].startswith("asked: sent to r0")


@pytest.mark.parametrize(
    ("request_id", "words"),
    [
        (
            "held",
            "held: held for 1.25 s, number 9 of 12, waits for any replica, due in 0.50 s; before it: 7 more, first (",
        ),
        ("refused", "refused: refused, to be tried again after 2.5 s: queues are full (replicas 2)"),
    ],
)
def test_explain_tells_of_what_was_not_placed(address: str, request_id: str, words: str) -> None:
    result = CliRunner().invoke(app, ["explain", request_id, "--address", address], env=WIDE)
    assert result.exit_code == 0
    assert words in " ".join(result.stdout.split())


@pytest.mark.parametrize("columns", [40, 50, 80])
def test_explain_fits_its_terminal(address: str, columns: int) -> None:
    result = CliRunner().invoke(app, ["explain", "asked", "--address", address], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    table = [line for line in result.stdout.splitlines() if line[:1] in "┏│└"]
    assert max(map(len, table)) <= columns
    assert any("free_blocks" in line for line in table)
    assert ("and 1 more" in result.stdout) == (columns < 50)


def test_explain_scaling_shows_decisions_and_terms(address: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--scaling", "--address", address], env=WIDE)
    assert result.exit_code == 0
    for words in ("1 -> 3  up: 90% of blocks held", "2 run, 1 start; utilization 0.9, num_silent 1"):
        assert words in result.stdout


def test_explain_scaling_as_json(address: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--scaling", "--json", "--address", address])
    first = json.loads(result.stdout)[0]
    assert (first["num_before"], first["num_after"], first["terms"]["utilization"]) == (1, 3, 0.9)


@pytest.mark.parametrize("arguments", [["explain", "x", "--scaling"], ["status", "--watch", "--json"]])
def test_options_that_contradict_each_other_are_refused(address: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--address", address])
    assert (result.exit_code, result.stdout) == (2, "")


def test_tune_shows_and_changes_settings(core: FakeGateway, address: str) -> None:
    shown = CliRunner().invoke(app, ["tune", "--address", address])
    assert "target_utilization 0.5  (tuned)" in shown.stdout
    change = ["tune", "--address", address, "--max-replicas", "9"]
    assert CliRunner().invoke(app, change).exit_code == 1
    assert core.scaling_row.config.max_replicas == 4
    changed = CliRunner().invoke(app, change, env={"SHOAL_ADMIN_KEY": ADMIN_KEY})
    assert "max_replicas       9  (tuned)" in changed.stdout
    assert core.scaling_row.config.max_replicas == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "unknown"], "request_id: no routing decision is kept for 'unknown'"),
        (["tune", "--max-replicas", "2"], "the admin key is missing or wrong"),
        (["tune", "--admin-key", "é"], "admin_key: must be printable ASCII"),
        (["generate", "hi", "--temperature", "-1"], "temperature: got -1.0"),
        (["generate", "x" * 500], "below 128 tokens"),
    ],
)
def test_an_error_is_one_line(address: str, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--address", address])
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_core_is_one_line(core: FakeGateway, address: str) -> None:
    core.error = Unavailable("no replica is ready")
    result = CliRunner().invoke(app, ["generate", "hi", "--address", address])
    assert (result.exit_code, result.stderr) == (1, "no replica is ready\n")


@pytest.mark.parametrize("said", ["the replica's feed is not connected", "no certificate could be fetched"])
def test_what_a_gateway_says_of_connections_is_told(core: FakeGateway, address: str, said: str) -> None:
    core.error = Unavailable(said)
    assert CliRunner().invoke(app, ["generate", "hi", "--address", address]).stderr == f"{said}\n"


@pytest.mark.parametrize("arguments", [["generate", "hi"], ["status"], ["explain", "x"]])
def test_no_gateway_is_said_plainly(arguments: list[str]) -> None:
    address = free_address()
    result = CliRunner().invoke(app, [*arguments, "--address", address])
    assert result.exit_code == 1
    assert result.stderr == f"no Shoal gateway at {address}; start one with `make demo`\n"


def test_a_ray_that_does_not_start_is_quoted() -> None:
    with LocalRay(num_cpus=math.nan) as ray, pytest.raises(Unavailable, match="Ray has ended; it said") as caught:
        ray.wait_until_up()
    assert "--num-cpus" in str(caught.value)
    assert not ray.folder.exists()


@pytest.mark.parametrize("arguments", [["generate", "\udcff"], ["explain", "\udcff"]])
def test_what_is_no_text_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "must be valid UTF-8" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "--min-replicas", "99999999999"],
        ["tune", "--max-replicas", "-1"],
        ["bench", "scaling", "--requests-per-replica", "0"],
        ["bench", "scaling", "--requests-per-replica", "nan"],
    ],
)
def test_numbers_outside_their_range_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in result.stderr


def test_figures_that_could_not_be_kept_are_not_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", "--json", str(tmp_path / "nowhere" / "x.json")])
    assert result.exit_code == 1
    assert "no such file can be written" in result.stderr


def test_help_lists_everything_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from shoal_cluster.cli import app\n"
        "print(CliRunner().invoke(app, ['--help']).stdout)\n"
        "heavy = {'grpc', 'torch', 'ray', 'numpy', 'transformers', 'pydantic', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("generate", "chat", "status", "explain", "tune", *LATER):
        assert name in done.stdout


@pytest.mark.parametrize("name", LATER)
def test_late_commands_load(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.stdout
