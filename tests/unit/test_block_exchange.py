"""Blocks that an engine gives are those that another one takes: same tokens, nothing leaked, nothing overwritten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from fixtures.engines import running_engine
from fixtures.waiting import DEADLINE_S, until

from shoal_replica.engine import Engine
from shoal_replica.errors import ConfigError, Unavailable
from shoal_replica.executor import BlockPart
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.request import FinishReason
from shoal_replica.testing import expected_tokens, make_request

PROMPT = tuple(range(100, 130))  # seven whole blocks of four tokens
HASHES = tuple(hash_blocks(PROMPT, 4))


async def pieces(engine: Engine, first: int = 0, num_at_once: int = 3) -> list[tuple[int, tuple[BlockPart, ...]]]:
    async with aclosing(engine.blocks.give(HASHES, first, num_at_once)) as given:
        return [piece async for piece in given]


async def take(engine: Engine, given: Sequence[tuple[int, tuple[BlockPart, ...]]], hashes: Sequence[BlockHash]) -> int:
    with engine.blocks.taking(hashes) as taking:
        for piece in given:
            await taking.take(*piece)
        return taking.num_blocks


@pytest.mark.parametrize("beside_steps", [False, True])
@pytest.mark.parametrize("first", [0, 2, 7])
async def test_a_prompt_goes_on_from_another_engines_blocks(first: int, beside_steps: bool) -> None:
    async with running_engine() as (one, giver, _), running_engine() as (other, taker, recorder):
        giver.copies_beside_steps = taker.copies_beside_steps = beside_steps
        await one.add(make_request("r", PROMPT))
        if first:
            await other.add(make_request("before", PROMPT[: 4 * first], max_tokens=1))
        given = await pieces(one, first)
        assert sum(num_blocks for num_blocks, _ in given) == 7 - first
        assert await take(other, given, HASHES) == 7
        assert recorder.hashes >= set(HASHES)
        await other.add(make_request("r", PROMPT))
        assert recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)
        stats = other.stats()
        assert (stats.num_blocks_taken, one.stats().num_blocks_given) == (7 - first, 7 - first)
        assert stats.num_cached_tokens == 28
        for engine in (one, other):
            assert engine.stats().num_allocated_blocks == 0
            engine.check_invariants()


async def test_blocks_under_way_are_neither_evicted_nor_counted_as_free() -> None:
    async with running_engine(num_blocks=10, max_model_len=40) as (one, *_), running_engine() as (other, _, recorder):
        await one.add(make_request("r", PROMPT))
        async with aclosing(one.blocks.give(HASHES, 0, 4)) as given:
            first = await anext(given)
            assert one.stats().num_allocated_blocks == 7
            one.check_invariants()
            waits = one.add(make_request("large", range(30)))  # it needs what is being given
            done, _ = await asyncio.wait([waits], timeout=0.1)
            assert not done
            rest = [first, *[piece async for piece in given]]
        await waits
        assert await take(other, rest, HASHES) == 7
        await other.add(make_request("r", PROMPT))
        assert recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)


async def test_what_does_not_fit_is_not_taken_and_the_rest_stays_right() -> None:
    async with running_engine() as (one, *_), running_engine(num_blocks=8, max_model_len=32) as (other, held, recorder):
        await one.add(make_request("r", PROMPT))
        held.gate.clear()
        running = other.add(make_request("long", range(13), max_tokens=8))
        await until(lambda: held.is_held)
        given = await pieces(one)
        taking = asyncio.ensure_future(take(other, given, HASHES))
        await asyncio.sleep(0)
        held.gate.set()
        with pytest.raises(Unavailable, match="no room"):
            await taking
        await running
        assert recorder.tokens["long", 0] == expected_tokens(range(13), 8)
        await other.add(make_request("r", PROMPT[:20]))
        assert recorder.tokens["r", 0] == expected_tokens(PROMPT[:20], 4)
        other.check_invariants()


async def test_contents_of_another_kind_are_refused_and_leave_nothing() -> None:
    async with running_engine() as (one, *_), running_engine() as (other, executor, recorder):
        await one.add(make_request("r", PROMPT))
        given = await pieces(one)
        executor.layout = "another"
        with pytest.raises(ConfigError, match="must be of another"):
            await take(other, given, HASHES)
        assert other.stats().num_cached_blocks == other.stats().num_allocated_blocks == 0
        await other.add(make_request("r", PROMPT))
        assert recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)
        with pytest.raises(ConfigError, match="0 are missing"):
            await take(other, given, HASHES)


async def test_what_taken_blocks_displace_goes_to_host_memory_first() -> None:
    old = tuple(range(28))
    async with (
        running_engine() as (one, *_),
        running_engine(num_blocks=8, max_model_len=32, num_host_blocks=16) as (other, _, recorder),
    ):
        await one.add(make_request("r", PROMPT))
        await other.add(make_request("old", old))
        assert await take(other, await pieces(one), HASHES) == 7
        for name, prompt in (("new", PROMPT[:28]), ("old again", old), ("new again", PROMPT[:28])):
            await other.add(make_request(name, prompt))
            assert recorder.tokens[name, 0] == expected_tokens(prompt, 4)
        assert other.stats().num_cached_tokens >= 3 * 24
        assert other.blocks.num_missing(hash_blocks(old, 4)) == 0  # host memory has what the device has not
        other.check_invariants()


async def test_a_planned_step_that_was_dropped_hinders_nothing() -> None:
    """It would have moved a block to host memory, but the last sequence ended before it."""
    prompt = (500, 501, 502, 503)
    stop = expected_tokens(prompt, 5)[-1]
    request = make_request("stops", prompt, max_tokens=12)
    request = replace(request, sampling_params=replace(request.sampling_params, stop_token_ids=(stop,)))
    async with (
        running_engine() as (one, *_),
        running_engine(num_blocks=8, max_model_len=32, num_host_blocks=16) as (other, _, recorder),
    ):
        await one.add(make_request("r", PROMPT))
        await other.add(make_request("old", range(28)))
        await other.add(request)
        assert recorder.tokens["stops", 0][-1] == stop
        await until(lambda: not other._scheduler.kv.host.is_planned)  # until the dropped step has landed
        assert await take(other, await pieces(one), HASHES) == 7
        await other.add(make_request("old again", range(28)))
        assert recorder.tokens["old again", 0] == expected_tokens(range(28), 4)
        other.check_invariants()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_a_failed_step_should_have_moved_to_host_memory_is_not_there(is_cancelled: bool) -> None:
    old = tuple(range(28))
    async with (
        running_engine() as (one, *_),
        running_engine(num_blocks=8, max_model_len=32, num_host_blocks=16) as (other, executor, recorder),
    ):
        await one.add(make_request("r", PROMPT))
        given = await pieces(one)
        await other.add(make_request("old", old))
        executor.failure = MemoryError("full")
        if is_cancelled:
            executor.gate.clear()
        taking = asyncio.create_task(take(other, given, HASHES))
        if is_cancelled:
            await until(lambda: executor.is_held)
            taking.cancel()
            executor.gate.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else MemoryError):
            await taking
        executor.failure = None
        other.check_invariants()
        await other.add(make_request("old again", old))
        assert recorder.tokens["old again", 0] == expected_tokens(old, 4)
        assert await take(other, given, HASHES) == 7


async def test_a_held_request_waits_for_its_release_and_can_be_taken_back() -> None:
    async with running_engine() as (engine, executor, recorder):
        held = [engine.add(make_request(name, PROMPT), num_coming_blocks=4) for name in ("a", "b", "c")]
        await engine.add(make_request("passes", PROMPT[:9]))
        assert executor.num_started == 4
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_waiting_tokens) == (3, 3 * (len(PROMPT) - 16))  # when its blocks are here
        assert not any(stats.due_tokens)  # and until then it goes before nobody
        engine.check_invariants()
        assert engine.hand_back("a")
        engine.abort("b")
        engine.release("c")
        await held[2]
        assert recorder.tokens["c", 0] == expected_tokens(PROMPT, 4)
        assert not recorder.tokens["b", 0]
        with pytest.raises(Unavailable, match="handed"):
            await held[0]
        engine.release("a")  # it is over
        engine.check_invariants()


async def test_blocks_that_come_back_from_host_memory_are_given_once_they_are_there() -> None:
    async with (
        running_engine(num_blocks=8, max_model_len=32, num_host_blocks=16) as (one, executor, _),
        running_engine() as (other, _, recorder),
    ):
        await one.add(make_request("r", PROMPT[:28]))
        await one.add(make_request("old", range(28)))  # whose blocks displace those of r
        executor.copies_beside_steps = True
        executor.gate.clear()
        again = one.add(make_request("again", PROMPT[:28]))
        await until(lambda: executor.is_held)  # its step has not brought them back yet
        giving = asyncio.create_task(pieces(one))
        await asyncio.sleep(0.02)
        executor.gate.set()
        await again
        await take(other, await giving, HASHES)
        await other.add(make_request("r", PROMPT))
        assert recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)


async def test_however_often_it_is_cancelled_a_write_ends_before_its_blocks_are_given_out() -> None:
    async with (
        running_engine() as (one, *_),
        running_engine(num_blocks=10, max_model_len=40) as (other, taker, recorder),
    ):
        await one.add(make_request("r", PROMPT))
        given, gate, write = await pieces(one, num_at_once=7), threading.Event(), taker.write_blocks
        taker.copies_beside_steps = True

        def slowly(block_ids: Sequence[int], parts: Sequence[BlockPart]) -> None:
            gate.wait(DEADLINE_S)
            write(block_ids, parts)

        taker.write_blocks = slowly  # type: ignore[method-assign]
        taking = asyncio.create_task(take(other, given, HASHES))
        await until(lambda: other.stats().num_allocated_blocks == 7)
        await asyncio.sleep(0.02)
        for _ in range(3):
            taking.cancel()
            await asyncio.sleep(0.01)
            assert not taking.done()
        victim = other.add(make_request("victim", range(29), max_tokens=6))
        await asyncio.sleep(0.02)
        gate.set()
        await victim
        assert recorder.tokens["victim", 0] == expected_tokens(range(29), 6)
        with pytest.raises(asyncio.CancelledError):
            await taking


@pytest.mark.parametrize("kind", ["gives", "takes"])
async def test_a_step_that_hangs_is_noticed_whatever_waits_behind_it(kind: str) -> None:
    async with running_engine() as (giver, *_), running_engine(step_timeout_s=0.2) as (engine, executor, recorder):
        await giver.add(make_request("r", PROMPT))
        given = await pieces(giver)
        await engine.add(make_request("r", PROMPT[:9]))
        executor.gate.clear()
        engine.add(make_request("s", (1, 2, 3)))
        await until(lambda: executor.is_held)
        work = pieces(engine) if kind == "gives" else take(engine, given, HASHES)
        waits = asyncio.ensure_future(work)
        await until(lambda: recorder.reasons.get(("s", 0)) == FinishReason.ERROR)
        executor.gate.set()
        await asyncio.wait([waits])


async def test_blocks_under_way_do_not_preempt_what_runs() -> None:
    async with (
        running_engine() as (one, *_),
        running_engine(num_blocks=14, max_model_len=48) as (other, taker, recorder),
    ):
        await one.add(make_request("r", PROMPT))
        given = await pieces(one)
        taker.pause_s = 0.002
        long = other.add(make_request("long", range(5), max_tokens=16))
        await until(lambda: other.stats().num_generated_tokens)
        with other.blocks.taking(HASHES) as taking:
            await taking.take(*given[0])
            await long
        assert recorder.tokens["long", 0] == expected_tokens(range(5), 16)
        assert other.stats().num_preemptions == 0
