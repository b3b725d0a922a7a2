"""The engine benchmark's workers and rounds, with scripted workers: the protocol, the order, and failures."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shoal_replica.bench.contender import FLOOR, SHOAL, Contender
from shoal_replica.bench.runner import Plan, Runner
from shoal_replica.bench.worker_process import WorkerProcess, running
from shoal_replica.errors import ConfigError, DeadlineExceeded, Unavailable

SCRIPT = Path(__file__).parents[1] / "fixtures" / "bench_worker.py"
GENERATE = {"op": "generate", "prompts": [[5, 6]], "max_tokens": 3}
TIMEOUT_S = 30.0
PLAN = Plan(workloads="b", repeats=2, seed=0, timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)


def scripted(name: str, mode: str = "good", workloads: str = "abcdef") -> Contender:
    settings = json.dumps({"model": "m", "num_threads": 1, "cores": sorted(os.sched_getaffinity(0))[:1]})
    return Contender(
        name=name,
        command=(sys.executable, str(SCRIPT), mode, settings),
        workloads=workloads if name != FLOOR else "",
        environment={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        is_shoal=name.startswith(SHOAL),
    )


async def ask(mode: str, timeout_s: float = TIMEOUT_S) -> dict[str, object]:
    async with running(scripted("peer", mode), TIMEOUT_S) as worker:
        return await worker.ask(GENERATE, timeout_s)


async def test_a_worker_says_hello_answers_and_is_gone_afterwards() -> None:
    async with running(scripted("peer"), TIMEOUT_S) as worker:
        assert worker.hello["versions"]["scripted"] == "1"
        assert 0 < worker.ready_s < TIMEOUT_S
        answer = await worker.ask(GENERATE, TIMEOUT_S)
        assert answer["num_tokens"] == [3]
        assert answer["seconds"] >= 0.003
        assert worker.peak_bytes() > 1_000_000
        (process,) = (p for p in psutil.Process().children() if str(SCRIPT) in p.cmdline())
    assert not process.is_running()


async def test_a_paused_worker_is_stopped_with_its_children_and_goes_on_when_resumed() -> None:
    async with running(scripted("peer"), TIMEOUT_S) as worker:
        worker.pause()
        (process,) = (p for p in psutil.Process().children() if str(SCRIPT) in p.cmdline())
        deadline = time.monotonic() + TIMEOUT_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await worker.ask(GENERATE, 0.05)
        worker.resume()
        assert (await worker.ask(GENERATE, TIMEOUT_S))["num_tokens"] == [3]


async def test_a_paused_worker_is_ended_too() -> None:
    async with running(scripted("peer"), TIMEOUT_S) as worker:
        worker.pause()
    assert not [p for p in psutil.Process().children() if str(SCRIPT) in p.cmdline()]


async def test_a_missing_package_is_named_with_its_interpreter() -> None:
    with pytest.raises(ConfigError, match=rf"peer \({sys.executable}\): package enginelib is not installed there"):
        await ask("missing")


async def test_an_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(ConfigError, match="ValueError: weights are torn"):
        await ask("broken")


async def test_a_worker_that_dies_is_reported_with_its_last_words() -> None:
    with pytest.raises(Unavailable, match=r"ended \(status 3\) while doing 'generate'(.|\n)*about to die"):
        await ask("dies")


async def test_a_worker_that_hangs_meets_the_deadline_and_is_ended() -> None:
    with pytest.raises(DeadlineExceeded, match=r"peer: no answer in 0\.2 s of doing 'generate'"):
        await ask("hangs", 0.2)
    assert not [p for p in psutil.Process().children() if str(SCRIPT) in p.cmdline()]


async def test_loading_has_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="of loading"):
        async with running(scripted("peer", "silent"), 0.5):
            pass


async def test_an_interpreter_that_cannot_run() -> None:
    contender = replace(scripted("peer"), command=("/nowhere/python",))
    with pytest.raises(ConfigError, match="peer: cannot run /nowhere/python"):
        async with running(contender, TIMEOUT_S):
            pass


async def test_rounds_alternate_and_each_row_has_a_sample_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    started: list[str] = []

    def start(contender: Contender, timeout_s: float) -> AbstractAsyncContextManager[WorkerProcess]:
        started.append(contender.name)
        return running(contender, timeout_s)

    monkeypatch.setattr("shoal_replica.bench.runner.running", start)
    contenders = [scripted(FLOOR), scripted(SHOAL, "exact"), scripted("peer", "exact")]
    outcome = await Runner(replace(PLAN, workloads="bef"), contenders, told.append).run()
    assert [line.split(": ")[1] for line in told if line.startswith("round")] == [
        "shoal (b)", "peer (b)", "shoal (e)"
    ] * 2  # fmt: skip
    assert Counter(started) == {FLOOR: 1, "peer": 1, SHOAL: 1 + 2 * 2}, "before each (e) once untimed, for the files"
    found = [(s.row, s.contender, s.round) for s in outcome.samples]
    assert [f for f in found if f[0] == "b"] == [("b", n, r) for r in (0, 1) for n in (SHOAL, "peer")]
    assert [f for f in found if f[0] == "e"] == [("e", "peer", 0), ("e", SHOAL, 0), ("e", SHOAL, 1)]
    assert {f[:2] for f in found if f[0].startswith("f")} == {("f", SHOAL), ("f_beyond", SHOAL), ("f", "peer")}
    assert [s.value for s in outcome.samples if s.row == "b"] == [pytest.approx(1.0)] * 4  # 128 tokens less the first
    peaks = {s.row: s.value for s in outcome.samples if s.contender == SHOAL}
    assert peaks["f"] - peaks["f_beyond"] == pytest.approx(11)
    # Only (b) has a floor: it is sampled before the first turn of a round and after each turn.
    assert len(outcome.floors) == 2 * 3
    assert [s.row for s in outcome.samples if s.floor is not None] == ["b"] * 4
    assert not outcome.failures


async def test_a_turn_is_held_to_the_better_floor_of_before_and_after() -> None:
    contenders = [scripted(FLOOR, "slowing"), scripted(SHOAL, "exact"), scripted("peer", "exact")]
    outcome = await Runner(PLAN, contenders).run()
    reads = [floor.read_bytes_s for floor in outcome.floors]
    assert reads == sorted(reads, reverse=True)
    befores = [0, 1, 3, 4]  # three floor samples in each of two rounds: before Shoal, between the two, after the peer
    assert [s.floor for s in outcome.samples] == [outcome.floors[i] for i in befores]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("dies", "ended (status 3)"), ("hangs", "no answer in 2 s"), ("short", "[127] tokens where 128")],
)
async def test_a_peer_that_fails_falls_out_and_the_others_go_on(mode: str, reason: str) -> None:
    contenders = [scripted(FLOOR), scripted(SHOAL), scripted("peer", mode), scripted("other")]
    plan = replace(PLAN, timeout_s=2.0) if mode == "hangs" else PLAN
    outcome = await Runner(plan, contenders).run()
    assert list(outcome.failures) == ["peer"]
    assert reason in outcome.failures["peer"]
    assert [s.contender for s in outcome.samples] == [SHOAL, "other"] * 2


def test_who_has_none_of_the_workloads_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"^--workloads: got 'cs'; peer has only 'ab', so nothing of it "):
        Runner(replace(PLAN, workloads="cs"), [scripted(FLOOR), scripted(SHOAL), scripted("peer", workloads="ab")])


async def test_without_shoal_there_is_no_run() -> None:
    with pytest.raises(Unavailable, match="shoal: its process ended"):
        await Runner(PLAN, [scripted(FLOOR), scripted(SHOAL, "dies"), scripted("peer")]).run()
    assert not [p for p in psutil.Process().children() if str(SCRIPT) in p.cmdline()]
