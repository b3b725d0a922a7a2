"""Running requests leave a replica that drains, with their blocks; their clients notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fixtures.fake_serve import Answer, FakeServe, ask, serving
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.serve import moves
from shoal_cluster.serve.journal import EventKind
from shoal_replica.testing import expected_tokens

PROMPT = tuple(range(100, 121))
NUM_TOKENS = 60


@asynccontextmanager
async def running(count: int = 1, **fields: object) -> AsyncIterator[tuple[FakeServe, str, list[asyncio.Task[Answer]]]]:
    """Calls that have begun at one of two replicas, which takes a while for them; its name."""
    async with serving("a", "b") as serve:
        serve.hold()
        for made in serve.replicas.values():
            made.executor.pause_s = 0.005
        first = asyncio.create_task(ask(serve, "call-0", prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS, **fields))
        await until(lambda: serve.replica_of("call-0"))
        owner = serve.replica_of("call-0")
        await until(lambda: serve.replicas[owner].engine.stats().num_generated_tokens > 10)
        others = [
            asyncio.create_task(ask(serve, f"call-{n}", prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS))
            for n in range(1, count)
        ]
        await until(lambda: len(serve.ledger.sent) == count)
        yield serve, owner, [first, *others]
        for made in serve.replicas.values():
            made.executor.pause_s = 0.0


def other_than(name: str) -> str:
    return "b" if name == "a" else "a"


@pytest.mark.parametrize("leaves", ["drains", "is stopped by Serve"])
async def test_a_running_request_goes_on_elsewhere_with_its_blocks(leaves: str) -> None:
    async with running() as (serve, owner, (call,)):
        made, other = serve.replicas[owner], serve.replicas[other_than(owner)]
        if leaves == "drains":
            assert await made.engine.drain(DEADLINE_S)
        else:
            serve.leave(owner)
            await until(lambda: made.engine.stats().num_running == 0)
        assert made.engine.stats().num_generated_tokens < NUM_TOKENS
        answer = await call
        assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
        assert answer.usage is not None
        assert (answer.usage.replica_id, answer.usage.num_resumes) == (other_than(owner), 0)
        taken = other.engine.stats().num_blocks_taken
        assert taken >= 7  # all full blocks of the prompt and of more than ten tokens
        stats = other.engine.stats()
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (0, 0)  # nothing of it is computed again
        told = [event.text for event in serve.ledger.journal.last(9) if event.kind is EventKind.RESUMED]
        assert told == [f"moved: replica {owner} has handed it back"]
        assert [leg.end for leg in serve.times[0].legs] == ["moved", ""]
        quality = serve.ledger.view_tally.quality()
        assert quality.num_cached_tokens == quality.num_predicted_tokens


async def test_sequences_of_one_request_each_go_on() -> None:
    async with running(n=3) as (serve, owner, (call,)):
        assert await serve.replicas[owner].engine.drain(DEADLINE_S)
        assert (await call).tokens == [expected_tokens(PROMPT, NUM_TOKENS, index) for index in range(3)]


async def test_only_so_many_at_a_time_and_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MAX_AT_ONCE", 1)
    async with running(count=4) as (serve, owner, calls):
        made, other = serve.replicas[owner], serve.replicas[other_than(owner)]
        assert await made.engine.drain(DEADLINE_S)
        for answer in await asyncio.gather(*calls):
            assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
        assert made.engine.stats().num_finished + other.engine.stats().num_finished == 4
        assert other.engine.stats().num_generated_tokens > 0


async def test_a_beam_search_stays_to_its_end() -> None:
    async with serving("a", "b") as serve:
        serve.hold()
        for made in serve.replicas.values():
            made.executor.pause_s = 0.005
        call = asyncio.create_task(ask(serve, "beams", prompt_token_ids=PROMPT, max_tokens=20, beam_width=2))
        await until(lambda: any(made.engine.stats().num_running for made in serve.replicas.values()))
        owner = serve.replica_of("beams")
        assert await serve.replicas[owner].engine.drain(DEADLINE_S)
        answer = await call
        assert answer.usage is not None
        assert answer.usage.replica_id == owner
        assert serve.replicas[other_than(owner)].engine.stats().num_steps == 0


@pytest.mark.parametrize("why", ["there is no other replica", "no blocks are given"])
async def test_it_stays_where_it_would_be_computed_again(why: str) -> None:
    async with running() as (serve, owner, (call,)):
        if why == "no blocks are given":
            serve.ledger.sources._addresses.clear()
        else:
            serve.replicas[other_than(owner)].engine._draining = True
            await until(lambda: not serve.ledger.can_place({owner}))
        assert await serve.replicas[owner].engine.drain(DEADLINE_S)
        answer = await call
        assert answer.usage is not None
        assert answer.usage.replica_id == owner
        assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
