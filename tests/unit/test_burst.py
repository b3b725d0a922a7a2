"""How long an idle engine delays its first step for requests that arrive together."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from fixtures.engines import GatedExecutor, finished, running_engine
from fixtures.waiting import until

from shoal_replica import burst as burst_module
from shoal_replica.burst import SLACK, WITHIN_S, Burst
from shoal_replica.engine import Engine
from shoal_replica.testing import expected_tokens, make_request

GAP_S, STEP_S = 0.002, 1.0


def come(burst: Burst, start_s: float, *after_s: float) -> float:
    """Requests arrive at an idle engine, the first at ``start_s``. Returns how long that one should wait."""
    burst.note(start_s, 0, STEP_S)
    left_s = burst.left_s(start_s)
    for number, gap_s in enumerate(after_s):
        burst.note(start_s + gap_s, number + 1, STEP_S)
    return left_s


def test_nobody_waits_before_two_bursts_have_come() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        assert come(burst, start_s) == 0.0
        assert come(burst, start_s + 0.5, GAP_S, 2 * GAP_S) == 0.0


def test_a_third_burst_waits_for_as_many_as_the_smaller_of_the_last_two_had() -> None:
    burst = Burst()
    come(burst, 0.0, GAP_S, 2 * GAP_S)
    come(burst, 1.0, GAP_S)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0) == pytest.approx(SLACK * 2 * GAP_S)
    burst.note(2.001, 1, STEP_S)
    assert burst.left_s(2.001) == 0.0


def test_it_waits_no_longer_than_they_took_with_some_slack() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, GAP_S)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0 + SLACK * GAP_S / 2) == pytest.approx(SLACK * GAP_S / 2)
    assert burst.left_s(2.0 + SLACK * GAP_S + 1e-6) == 0.0


def test_it_waits_no_longer_than_half_a_step() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, GAP_S)
    burst.note(2.0, 0, GAP_S)
    assert burst.left_s(2.0) == pytest.approx(GAP_S / 2)


def test_one_who_comes_again_is_no_company_of_its_own() -> None:
    """Two clients whose answers are short."""
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, GAP_S)
        for number in range(2, 5):
            burst.note(start_s + number * GAP_S, 1, STEP_S)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0) == pytest.approx(SLACK * GAP_S)
    burst.note(2.0 + GAP_S, 1, STEP_S)
    assert burst.left_s(2.0 + GAP_S) == 0.0


def test_the_longest_wait() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, 0.9 * WITHIN_S)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0) == pytest.approx(WITHIN_S)


def test_who_comes_later_is_no_company() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, WITHIN_S + 0.001)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0) == 0.0


def test_one_alone_after_bursts_waits_once() -> None:
    burst = Burst()
    for start_s in (0.0, 1.0):
        come(burst, start_s, GAP_S)
    burst.note(2.0, 0, STEP_S)
    assert burst.left_s(2.0) > 0.0
    for start_s in (3.0, 4.0):
        burst.note(start_s, 0, STEP_S)
        assert burst.left_s(start_s) == 0.0


async def two_bursts(engine: Engine, executor: GatedExecutor) -> None:
    """Run two bursts of two requests each."""
    for _ in range(2):
        executor.gate.clear()
        futures = [engine.add(make_request(uuid.uuid4().hex, max_tokens=1))]
        await until(lambda: executor.is_held)
        futures.append(engine.add(make_request(uuid.uuid4().hex, max_tokens=1)))
        executor.gate.set()
        await asyncio.gather(*map(finished, futures))


async def test_an_engine_begins_with_all_of_a_third_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_module, "WITHIN_S", 60.0)
    monkeypatch.setattr(burst_module, "SLACK", 1000.0)
    monkeypatch.setattr(burst_module, "SHARE_OF_STEP", 1e6)
    async with running_engine() as (engine, executor, recorder):
        for number in range(3):
            executor.gate.clear()
            steps_before, futures = executor.num_started, []
            for i in range(4):
                futures.append(engine.add(make_request(f"{number}-{i}", (i, 1), max_tokens=1)))
                if i < 3:
                    await asyncio.sleep(GAP_S)
                if i == 0 and number < 2:
                    await until(lambda steps=steps_before: executor.num_started > steps)  # type: ignore[misc]
            assert number < 2 or executor.num_started == steps_before
            executor.gate.set()
            await asyncio.gather(*map(finished, futures))
            assert executor.num_started - steps_before == (2 if number < 2 else 1)
        for i in range(4):
            assert recorder.tokens[f"2-{i}", 0] == expected_tokens((i, 1), 1)


async def test_whoever_leaves_while_an_engine_waits_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_module, "WITHIN_S", 0.05)
    monkeypatch.setattr(burst_module, "SLACK", 1000.0)
    monkeypatch.setattr(burst_module, "SHARE_OF_STEP", 1e6)
    async with running_engine() as (engine, executor, _):
        await two_bursts(engine, executor)
        steps = executor.num_started
        gone = engine.add(make_request("gone"))
        await asyncio.sleep(0)
        engine.abort("gone")
        await finished(gone)
        await finished(engine.add(make_request("next", max_tokens=1)))
        assert executor.num_started == steps + 1
        engine.check_invariants()


async def test_a_step_that_the_first_one_fills_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has 32 tokens: a prompt of 16 leaves room for another like it, one of 17 does not."""
    monkeypatch.setattr(burst_module, "WITHIN_S", 60.0)
    monkeypatch.setattr(burst_module, "SLACK", 1e6)
    monkeypatch.setattr(burst_module, "SHARE_OF_STEP", 1e9)
    async with running_engine(max_num_batched_tokens=32) as (engine, executor, _):
        await two_bursts(engine, executor)
        await finished(engine.add(make_request("long", tuple(range(17)), max_tokens=1)))
        await two_bursts(engine, executor)
        steps = executor.num_started
        waits = engine.add(make_request("short", tuple(range(20, 36)), max_tokens=1))
        await asyncio.sleep(0.1)
        assert executor.num_started == steps
        company = engine.add(make_request("company", (1,), max_tokens=1))
        await asyncio.gather(finished(waits), finished(company))
        assert executor.num_started == steps + 1
