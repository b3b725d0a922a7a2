"""The engine loop: tokens stream, an abort frees blocks at once, a failure ends everything, a stop leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from dataclasses import replace

import pytest
from fixtures.engines import Recorder, finished, mid_step, running_engine
from fixtures.waiting import DEADLINE_S, until

from shoal_replica.adapter import AdapterConfig
from shoal_replica.errors import ConfigError, EngineDead, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.request import FinishReason
from shoal_replica.testing import NUM_ADAPTER_PARTS, expected_tokens, make_request

ABORT, ERROR, LENGTH = FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH


async def test_streams_the_tokens_of_many_requests() -> None:
    async with running_engine() as (engine, _, recorder):
        requests = [make_request(f"r{i}", range(i, 3 * i + 1), max_tokens=i + 1, n=1 + i % 3) for i in range(12)]
        await asyncio.gather(*(finished(engine.add(request)) for request in requests))
        for i, request in enumerate(requests):
            for index in range(request.sampling_params.n):
                assert recorder.tokens[f"r{i}", index] == expected_tokens(request.prompt_token_ids, i + 1, index)
                assert recorder.reasons[f"r{i}", index] is LENGTH
        assert len(recorder.reasons) == sum(request.sampling_params.n for request in requests)
        assert recorder.reports[-1].stats.num_finished == 12
        assert engine.stats().num_allocated_blocks == 0
        engine.check_invariants()


async def test_each_step_is_one_report() -> None:
    async with running_engine() as (engine, executor, recorder):
        await finished(engine.add(make_request(max_tokens=5)))
        with_tokens = [report for report in recorder.reports if report.deltas]
        assert [len(report.deltas) for report in with_tokens] == [1] * 5
        assert executor.num_started == 5
        assert [report.stats.num_steps for report in with_tokens] == [1, 2, 3, 4, 5]


async def test_resumes_after_the_tokens_it_is_given() -> None:
    async with running_engine() as (engine, _, recorder):
        prompt = (5, 6, 7)
        tokens = expected_tokens(prompt, 6)
        await finished(engine.add(make_request("r", prompt, max_tokens=6, output_token_ids=tokens[:4])))
        assert recorder.tokens["r", 0] == tokens[4:]
        assert recorder.starts["r", 0] == 4


async def test_an_abort_mid_step_frees_the_blocks_at_once() -> None:
    async with running_engine() as (engine, executor, recorder):
        gone = engine.add(make_request("gone", range(30), max_tokens=50))
        await until(lambda: recorder.tokens["gone", 0])
        kept = engine.add(make_request("kept", range(8), max_tokens=5))
        await until(lambda: recorder.tokens["kept", 0])
        await mid_step(executor)
        held = engine.stats().num_allocated_blocks
        engine.abort("gone")
        assert engine.stats().num_allocated_blocks <= held - 8
        assert gone.done()
        assert recorder.reasons["gone", 0] is ABORT
        engine.check_invariants()
        executor.gate.set()
        await finished(kept)
        assert recorder.tokens["kept", 0] == expected_tokens(range(8), 5)
        assert engine.stats().num_allocated_blocks == 0


async def test_thirty_of_thirty_aborts_free_everything() -> None:
    async with running_engine(num_blocks=40, max_num_seqs=5) as (engine, executor, recorder):
        for i in range(30):
            future = engine.add(make_request(f"r{i}", range(10), max_tokens=100, n=1 + i % 3))
            if i % 3 == 0:
                await until(lambda i=i: recorder.tokens[f"r{i}", 0])
            elif i % 3 == 1:
                await mid_step(executor)
            engine.abort(f"r{i}")
            assert future.done()
            assert engine.stats().num_allocated_blocks == 0
            assert engine.stats().num_running + engine.stats().num_waiting == 0
            executor.gate.set()
        assert set(recorder.reasons.values()) == {ABORT}
        assert len(recorder.reasons) == sum(1 + i % 3 for i in range(30))
        assert await engine.drain(5.0)


async def test_one_sequence_of_several_may_end_alone() -> None:
    async with running_engine() as (engine, executor, recorder):
        future = engine.add(make_request("r", range(6), max_tokens=20, n=3))
        await until(lambda: recorder.tokens["r", 1])
        await mid_step(executor)
        engine.abort("r", 1)
        assert recorder.reasons == {("r", 1): ABORT}
        assert not future.done()
        executor.gate.set()
        await finished(future)
        for index in (0, 2):
            assert recorder.tokens["r", index] == expected_tokens(range(6), 20, index)


async def test_the_last_sequence_to_be_aborted_ends_the_request() -> None:
    async with running_engine() as (engine, executor, recorder):
        future = engine.add(make_request("r", range(6), max_tokens=100, n=3))
        await until(lambda: recorder.tokens["r", 2])
        await mid_step(executor)
        for index in (2, 0, 1):
            assert not future.done()
            engine.abort("r", index)
        assert future.done()
        assert engine.stats().num_allocated_blocks == 0


@pytest.mark.parametrize("index", [None, 0])
async def test_siblings_that_never_started_end_with_the_first(index: int | None) -> None:
    async with running_engine() as (engine, executor, recorder):
        executor.gate.clear()
        future = engine.add(make_request("r", range(100), n=3))
        await until(lambda: executor.is_held)
        engine.abort("r", index)
        assert future.done()
        assert recorder.reasons == {("r", i): ABORT for i in range(3)}


async def test_unknown_ids_are_ignored() -> None:
    async with running_engine() as (engine, _, recorder):
        engine.abort("nobody")
        engine.abort("nobody", 3)
        future = engine.add(make_request("r", max_tokens=1))
        engine.abort("r", 7)
        await finished(future)
        engine.abort("r")
        assert recorder.reasons == {("r", 0): LENGTH}


async def test_a_subscriber_may_abort_what_it_is_told_of() -> None:
    async with running_engine() as (engine, _, recorder):
        engine.subscribe(lambda report: [engine.abort(d.request_id) for d in report.deltas if d.position == 3])
        futures = [engine.add(make_request(f"r{i}", (i,), max_tokens=50, n=2)) for i in range(3)]
        await asyncio.gather(*map(finished, futures))
        assert set(recorder.reasons.values()) == {ABORT}
        assert len(recorder.reasons) == 6
        engine.check_health()


async def test_all_subscribers_hear_the_reports_in_order() -> None:
    async with running_engine() as (engine, _, recorder):
        last = Recorder()
        engine.subscribe(lambda report: [engine.abort(d.request_id) for d in report.deltas if d.position == 3])
        engine.subscribe(last)
        await asyncio.gather(*(finished(engine.add(make_request(f"r{i}", (i,), max_tokens=50))) for i in range(3)))
        assert last.reports == recorder.reports
        assert last.tokens == recorder.tokens


async def test_the_reports_add_up_to_the_cache() -> None:
    async with running_engine(num_blocks=32) as (engine, _, recorder):
        futures = [engine.add(make_request(f"r{i}", range(i, i + 20), max_tokens=20)) for i in range(10)]
        await asyncio.gather(*map(finished, futures))
        assert recorder.hashes == set(engine.cache_hashes())
        assert recorder.hashes


async def test_a_picture_taken_mid_step_fits_the_reports_after_it() -> None:
    """A hash that the step evicts before the picture (snapshot) and stores again after it must not be lost."""
    async with running_engine(num_blocks=33) as (engine, executor, recorder):
        await finished(engine.add(make_request("old", range(20), max_tokens=100)))
        executor.gate.clear()
        future = engine.add(make_request("new", range(1000, 1100), max_tokens=8))
        await until(lambda: executor.is_held)
        reports = len(recorder.reports)
        picture = set(engine.cache_hashes())
        assert any(report.removed for report in recorder.reports[reports:]), "evictions were announced"
        assert picture == recorder.hashes
        executor.gate.set()
        await finished(future)
        assert recorder.hashes == set(engine.cache_hashes())


async def test_a_full_queue_refuses_and_counts_it() -> None:
    async with running_engine(max_num_seqs=1, max_num_waiting=2) as (engine, executor, _):
        executor.gate.clear()
        futures = [engine.add(make_request("first"))]
        await until(lambda: executor.is_held)
        futures += [engine.add(make_request(f"r{i}")) for i in range(2)]
        with pytest.raises(ResourceExhausted, match="2 sequences are waiting"):
            engine.add(make_request("late"))
        assert engine.stats().num_refused == 1
        executor.gate.set()
        await asyncio.gather(*map(finished, futures))
        await finished(engine.add(make_request("late")))


async def test_a_request_that_cannot_be_harms_nobody() -> None:
    async with running_engine() as (engine, executor, recorder):
        executor.gate.clear()
        future = engine.add(make_request("r"))
        with pytest.raises(InvalidArgument, match="running request"):
            engine.add(make_request("r"))
        with pytest.raises(InvalidArgument, match="must be under 128"):
            engine.add(make_request("long", range(128)))
        with pytest.raises(ValueError, match="more than one sequence"):
            engine.add(make_request("two", n=2, output_token_ids=(1,)))
        executor.gate.set()
        await finished(future)
        assert recorder.reasons == {("r", 0): LENGTH}
        assert await engine.drain(5.0)


async def test_a_failed_step_ends_every_request_and_the_engine() -> None:
    async with running_engine(max_num_seqs=2) as (engine, executor, recorder):
        executor.gate.clear()
        futures = [engine.add(make_request(f"r{i}", range(40), n=2)) for i in range(5)]
        await until(lambda: executor.is_held)
        executor.failure = RuntimeError("the device is on fire")
        executor.gate.set()
        await asyncio.gather(*map(finished, futures))
        assert recorder.reasons == {(f"r{i}", index): ERROR for i in range(5) for index in range(2)}
        async with asyncio.timeout(DEADLINE_S):
            await engine.ended()
        with pytest.raises(EngineDead, match="the device is on fire"):
            engine.check_health()
        with pytest.raises(EngineDead):
            engine.add(make_request("late"))
        assert engine.stats().num_allocated_blocks == 0


async def test_a_step_that_hangs_counts_as_failed() -> None:
    async with running_engine(heartbeat_s=0.01, step_timeout_s=0.05) as (engine, executor, recorder):
        executor.gate.clear()
        await finished(engine.add(make_request("r")))
        assert recorder.reasons == {("r", 0): ERROR}
        with pytest.raises(EngineDead, match="a step took longer than"):
            engine.check_health()


async def test_a_subscriber_that_fails_leaves_nobody_waiting() -> None:
    async with running_engine() as (engine, _, recorder):

        def fail(report: object) -> None:
            raise ValueError("a bug")

        unsubscribe = engine.subscribe(fail)
        futures = [engine.add(make_request(f"r{i}")) for i in range(3)]
        await asyncio.gather(*map(finished, futures))
        assert len(recorder.reasons) == 3
        with pytest.raises(EngineDead):
            engine.check_health()
        unsubscribe()


async def test_a_step_that_cannot_be_scheduled_leaves_nobody_waiting() -> None:
    """Nor those that the step before it has ended."""
    async with running_engine(max_num_batched_tokens=8) as (engine, executor, recorder):
        executor.gate.clear()
        futures = [engine.add(make_request("ends", range(3), max_tokens=1)), engine.add(make_request("r", range(30)))]
        await until(lambda: executor.is_held)

        def fail(now: float) -> None:
            raise RuntimeError("a bug")

        engine._scheduler.schedule = fail  # type: ignore[method-assign, assignment]
        executor.gate.set()
        await asyncio.gather(*map(finished, futures))
        assert recorder.reasons == {("ends", 0): LENGTH, ("r", 0): ERROR}
        assert len(recorder.tokens["ends", 0]) == 1
        with pytest.raises(EngineDead):
            engine.check_health()


async def test_reports_count_the_steps_that_have_ended() -> None:
    """Pieces of a prompt, decodes, and steps with drafts: though the next step is under way when they are made."""
    async with running_engine(max_num_batched_tokens=8, num_speculative_tokens=4) as (engine, _, recorder):
        await finished(engine.add(make_request("r", range(30), max_tokens=40)))
        numbers = [report.stats.num_steps for report in recorder.reports if report.step_s is not None]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_drain_takes_nobody_new_and_waits_for_the_others() -> None:
    async with running_engine() as (engine, executor, recorder):
        executor.gate.clear()
        future = engine.add(make_request("r", max_tokens=3))
        draining = asyncio.create_task(engine.drain(5.0))
        await until(lambda: engine.stats().draining)
        assert recorder.reports[-1].stats.draining, "the others are told"
        with pytest.raises(Unavailable, match="draining"):
            engine.add(make_request("late"))
        assert not draining.done()
        executor.gate.set()
        assert await draining
        assert future.done()
        assert recorder.reasons["r", 0] is LENGTH


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with running_engine() as (engine, executor, _):
        executor.gate.clear()
        engine.add(make_request())
        assert not await engine.drain(0.01)


async def test_an_idle_engine_and_a_long_step_give_signs_of_life() -> None:
    async with running_engine(heartbeat_s=0.01) as (engine, executor, recorder):
        await until(lambda: len(recorder.reports) >= 3)
        await finished(engine.add(make_request(max_tokens=1)))
        executor.gate.clear()
        future = engine.add(make_request("r", range(7)))
        await until(lambda: executor.is_held)
        before = len(recorder.reports)
        await until(lambda: len(recorder.reports) >= before + 3)
        assert executor.is_held
        assert recorder.reports[-1].stats.num_running == 1
        executor.gate.set()
        await finished(future)
        assert recorder.tokens["r", 0] == expected_tokens(range(7), 4)


@pytest.mark.parametrize("mid", [False, True], ids=["idle", "mid-step"])
async def test_a_stop_leaves_no_task_and_no_thread(mid: bool) -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with running_engine() as (engine, executor, recorder):
        await finished(engine.add(make_request("before", max_tokens=1)))
        if mid:
            executor.gate.clear()
            future = engine.add(make_request("during", range(9), n=2))
            await until(lambda: executor.is_held)
            stopping = asyncio.create_task(engine.stop())
            await until(future.done)
            assert executor.is_held
            executor.gate.set()
            await stopping
            assert {recorder.reasons["during", i] for i in range(2)} == {ABORT}
    assert executor.is_closed
    assert asyncio.all_tasks() == tasks
    await until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name.startswith("shoal")])
    with pytest.raises(Unavailable):
        engine.add(make_request("late"))


async def test_an_unsubscribed_follower_hears_nothing_more() -> None:
    async with running_engine() as (engine, _, recorder):
        heard: list[object] = []
        leave = engine.subscribe(heard.append)
        await finished(engine.add(make_request("one")))
        assert heard
        leave()
        heard.clear()
        await finished(engine.add(make_request("two")))
        assert not heard
        assert recorder.reasons["two", 0] is LENGTH


def lora(name: str = "a", folder: str = "") -> AdapterConfig:
    return AdapterConfig(name=name, folder=folder, factors=(), num_values=0)


async def test_adapters_come_and_go_between_steps() -> None:
    async with running_engine() as (engine, executor, recorder):
        with pytest.raises(Unavailable, match="adapter 'a' is not loaded"):
            engine.add(make_request("early", adapter="a"))
        running = engine.add(make_request("plain", max_tokens=40))
        await mid_step(executor)
        loading = asyncio.create_task(engine.adapters.load(lora()))
        await asyncio.sleep(0)
        assert executor.adapters == {}  # a step runs
        executor.gate.set()
        await loading
        assert executor.adapters == {"a": lora()}
        adapted = engine.add(make_request("adapted", max_tokens=9, adapter="a"))
        await mid_step(executor)
        leaving = asyncio.create_task(engine.adapters.unload("a"))
        await until(lambda: not engine.adapters.names)
        with pytest.raises(Unavailable, match="adapter 'a' is not loaded"):
            engine.add(make_request("late", adapter="a"))
        assert executor.adapters
        executor.gate.set()
        await asyncio.gather(finished(adapted), finished(running), leaving)
        assert executor.adapters == {}
        assert recorder.reasons["adapted", 0] is LENGTH


async def test_an_adapter_that_cannot_be_loaded_changes_nothing() -> None:
    async with running_engine() as (engine, executor, _):
        with pytest.raises(ConfigError, match="is refused"):
            await engine.adapters.load(lora(folder="refuse"))
        assert not engine.adapters.names
        await finished(engine.add(make_request(max_tokens=3)))
        assert executor.adapters == {}


async def test_an_adapter_stays_if_its_leaving_is_cancelled() -> None:
    async with running_engine() as (engine, executor, _):
        await engine.adapters.load(lora())
        adapted = engine.add(make_request("adapted", max_tokens=9, adapter="a"))
        await mid_step(executor)
        leaving = asyncio.create_task(engine.adapters.unload("a"))
        await until(lambda: not engine.adapters.names)
        leaving.cancel()
        await asyncio.wait([leaving])
        again = engine.add(make_request("again", max_tokens=2, adapter="a"))
        executor.gate.set()
        await asyncio.gather(finished(adapted), finished(again))
        assert set(executor.adapters) == {"a"}


async def test_steps_run_between_the_parts_of_an_adapter() -> None:
    async with running_engine() as (engine, executor, _):
        executor.pause_s = 0.01
        running = engine.add(make_request(max_tokens=40))
        await until(lambda: executor.num_started > 2)
        before = executor.num_started
        await engine.adapters.load(lora())
        assert executor.num_started >= before + NUM_ADAPTER_PARTS
        await finished(running)


@pytest.mark.parametrize("num_parts", range(NUM_ADAPTER_PARTS + 1))
async def test_who_cancels_a_load_leaves_all_of_it_or_nothing(num_parts: int) -> None:
    async with running_engine() as (engine, executor, _):
        taken, load = 0, executor.load_adapter

        def counted(adapter: AdapterConfig) -> Generator[None]:
            nonlocal taken
            for _ in load(adapter):
                if taken == num_parts:
                    cancelling.set()
                    gate.wait(DEADLINE_S)
                taken += 1
                yield
            cancelling.set()
            gate.wait(DEADLINE_S)

        gate, cancelling = threading.Event(), threading.Event()
        executor.load_adapter = counted  # type: ignore[method-assign]
        loading = asyncio.create_task(engine.adapters.load(lora()))
        await until(cancelling.is_set)
        loading.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert engine.adapters.names == set(executor.adapters) == ({"a"} if num_parts == NUM_ADAPTER_PARTS else set())
        executor.load_adapter = load  # type: ignore[method-assign]
        if num_parts == NUM_ADAPTER_PARTS:
            with pytest.raises(ConfigError, match="is already loaded"):
                await engine.adapters.load(lora())
        else:
            await engine.adapters.load(lora())
        await finished(engine.add(make_request(max_tokens=3, adapter="a")))


async def test_nobody_waits_for_an_adapter_of_an_engine_that_has_failed() -> None:
    async with running_engine() as (engine, executor, _):
        await engine.adapters.load(lora())
        engine.add(make_request("adapted", max_tokens=9, adapter="a"))
        await mid_step(executor)
        leaving = asyncio.create_task(engine.adapters.unload("a"))
        executor.failure = RuntimeError("fire")
        executor.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            await leaving


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("started", [False, True])
async def test_a_request_that_is_handed_back_counts_where_it_ends(started: bool, n: int) -> None:
    prompt, num_tokens = tuple(range(10)), 20
    async with running_engine() as (here, executor, recorder), running_engine() as (there, _, _):
        executor.pause_s = 0.01
        request = make_request("r", prompt, max_tokens=num_tokens, n=n)
        end = here.add(request)
        if started:
            await until(lambda: all(len(recorder.tokens["r", index]) > 2 for index in range(n)))
        assert here.hand_back("r", also_started=started)
        with pytest.raises(Unavailable):
            await end
        if not started:
            await finished(there.add(request))
        for index in range(n if started else 0):
            params = replace(request.sampling_params, n=1)
            known = tuple(recorder.tokens["r", index])
            leg = replace(request, request_id=f"r~{index}", index=index, output_token_ids=known, sampling_params=params)
            await finished(there.add(leg))
        assert here.stats().num_finished == 0
        assert there.stats().num_finished == 1
