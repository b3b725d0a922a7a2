"""Requests that were sent but have not started go elsewhere when their replica takes no new requests any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fixtures.fake_serve import Answer, FakeServe, ask, serving
from fixtures.replicas import Replica, replica
from fixtures.waiting import until

from shoal_cluster.policies import ranking, stall
from shoal_replica.testing import expected_tokens

RUNNING, WAITING = range(10, 31), range(40, 61)


@asynccontextmanager
async def one_runs_and_one_waits() -> AsyncIterator[
    tuple[FakeServe, Replica, asyncio.Task[Answer], asyncio.Task[Answer]]
]:
    """Replica a has one slot, and its step is held back: a second request waits there."""
    async with serving("a", max_num_seqs=1) as serve:
        made = serve.replicas["a"]
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=RUNNING))
        await until(lambda: made.executor.is_held)
        waiting = asyncio.create_task(ask(serve, "waiting", prompt_token_ids=WAITING))
        await until(lambda: made.engine.stats().num_waiting == 1 and serve.replica_of("waiting"))
        yield serve, made, running, waiting
        made.executor.gate.set()
        assert (await running).tokens == [expected_tokens(RUNNING, 4)]
        await waiting


@pytest.mark.parametrize("how", ["told to drain", "taken out by Serve"])
async def test_what_waits_at_a_leaving_replica_goes_elsewhere_and_what_runs_stays(how: str) -> None:
    async with one_runs_and_one_waits() as (serve, made, running, waiting), replica() as other:
        serve.join("b", other)
        await until(lambda: serve.ledger.view.is_connected("b"))
        if how == "told to drain":
            drained = asyncio.create_task(made.engine.drain(30.0))
        else:
            serve.leave("a")
        answer = await waiting
        assert not running.done()
        assert answer.tokens == [expected_tokens(WAITING, 4)]
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("b", 0)
        made.executor.gate.set()
        await running
        if how == "told to drain":
            assert await drained
        serve.leave("b")


async def test_what_waits_at_a_replica_that_stalls_goes_elsewhere_until_its_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall, "STALL_S", 0.2)
    async with serving("a", max_num_seqs=1, max_num_batched_tokens=128) as serve, replica() as other:
        made, stalls = serve.replicas["a"], list[None]()
        serve.ledger.recalls.on_stall = lambda: stalls.append(None)
        await ask(serve, "measures its pace", prompt_token_ids=range(100, 190))
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=RUNNING))
        await until(lambda: made.executor.is_held)
        waiting = asyncio.create_task(ask(serve, "waiting", prompt_token_ids=WAITING))
        await until(lambda: made.engine.stats().num_waiting == 1 and serve.replica_of("waiting"))
        serve.join("b", other)
        answer = await waiting
        assert answer.tokens == [expected_tokens(WAITING, 4)]
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("b", 0)
        assert not running.done()
        assert len(stalls) == 1
        assert not serve.ledger.can_place({"b"}), "nothing new goes to a"
        made.executor.gate.set()
        assert (await running).usage.replica_id == "a"
        await until(lambda: serve.ledger.can_place({"b"}))
        serve.leave("b")


async def test_what_comes_while_a_replica_is_silent_waits_for_it_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process seems to stand still, and it is the only one: nothing is sent to a replica that could not answer."""
    for module in (ranking, stall):
        monkeypatch.setattr(module, "MAX_AGE_S", 0.2)
    async with serving("a") as serve:
        serve.hold()
        feed = serve.ledger._feeds["a"]
        feed._connection.transport.pause_reading()
        early = asyncio.create_task(ask(serve, "early", prompt_token_ids=RUNNING))
        view = serve.ledger.view
        await until(lambda: view.is_stalled("a"))
        late = asyncio.create_task(ask(serve, "late", prompt_token_ids=WAITING))
        await until(lambda: serve.dispatcher.num_held == 1)
        assert view.reservation("late") is None
        assert [row.stalled for row in view.replicas_for((), 0.0)] == [True]
        feed._connection.transport.resume_reading()
        assert (await early).tokens == [expected_tokens(RUNNING, 4)]
        assert (await late).tokens == [expected_tokens(WAITING, 4)]
        assert (await late).usage.num_resumes == 0
        told = [event.text for event in serve.ledger.journal.last(9) if event.replica_id == "a"]
        assert any(text.startswith("not a word for 0.") for text in told)
        assert told[-1] == "it gets on: requests may go there again"


async def test_what_was_handed_back_stays_where_only_those_who_did_so_could_take_it() -> None:
    """Recalled from a, the request waits at b. When b drains, only a could take it, which has handed it back."""
    async with one_runs_and_one_waits() as (serve, made, running, waiting), replica(max_num_seqs=2) as other:
        serve.hold()
        other.executor.gate.clear()
        serve.join("b", other)
        await until(lambda: serve.ledger.view.is_connected("b"))
        first = asyncio.create_task(ask(serve, "first at b", prompt_token_ids=WAITING))
        await until(lambda: other.executor.is_held)
        serve.ledger.recalls.recall("a")
        await until(lambda: serve.replica_of("waiting#2") == "b" and other.engine.stats().num_waiting)
        drained = asyncio.create_task(other.engine.drain(30.0))
        await until(lambda: not serve.ledger.can_place({"a"}))
        other.executor.gate.set()
        assert (await waiting).usage.replica_id == "b"
        await first
        made.executor.gate.set()
        await running
        assert await drained
        serve.leave("b")


async def test_what_is_handed_back_waits_if_the_others_are_away_for_a_moment() -> None:
    """The request is asked back from a, which drains, as b could take it; then b's feed breaks."""
    async with one_runs_and_one_waits() as (serve, made, running, waiting), replica() as other:
        serve.hold()
        serve.join("b", other)
        await until(lambda: serve.ledger.view.is_connected("b"))
        drained = asyncio.create_task(made.engine.drain(30.0))
        await until(lambda: "waiting" in serve.ledger.recalls._asked, look_s=0)
        for subscriber in [*other.feed._subscribers.values()]:
            subscriber.transport.abort()
        answer = await waiting
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("b", 0)
        assert answer.tokens == [expected_tokens(WAITING, 4)]
        made.executor.gate.set()
        await running
        assert await drained
        serve.leave("b")


async def test_who_has_handed_a_request_back_may_take_it_again_when_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is asked back from a, which stalls, as b could take it; then b turns it away, and a gets on."""
    monkeypatch.setattr(stall, "STALL_S", 0.2)
    async with serving("a", max_num_seqs=1, max_num_batched_tokens=128) as serve, replica() as other:
        made, dispatcher = serve.replicas["a"], serve.hold()
        await ask(serve, "measures its pace", prompt_token_ids=range(100, 190))
        serve.dispatcher = None  # what comes next waits at a
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=RUNNING))
        await until(lambda: made.executor.is_held)
        waiting = asyncio.create_task(ask(serve, "waiting", prompt_token_ids=WAITING))
        await until(lambda: made.engine.stats().num_waiting == 1 and serve.replica_of("waiting"))
        serve.dispatcher = dispatcher
        other.engine._draining = True  # of which nobody has heard
        serve.join("b", other)
        await until(lambda: serve.ledger.view.is_stalled("a") and dispatcher.num_held == 1)
        serve.leave("b")
        made.executor.gate.set()
        answer = await waiting
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("a", 0)
        assert (await running).usage.replica_id == "a"


@pytest.mark.parametrize("count", [1, 5])
async def test_what_draining_replicas_refuse_waits_for_their_successor(count: int) -> None:
    """The request is on its way when the drains begin, of which the gateway has not heard."""
    async with serving(*(f"old-{number}" for number in range(count))) as serve, replica() as successor:
        dispatcher = serve.hold()
        for made in serve.replicas.values():
            made.engine._draining = True
        asked = asyncio.create_task(ask(serve, prompt_token_ids=WAITING))
        await until(lambda: len(serve.placements) > count and dispatcher.num_held == 1)
        serve.join("new", successor)
        answer = await asked
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("new", 0)
        assert answer.tokens == [expected_tokens(WAITING, 4)]
        serve.leave("new")


async def test_what_waits_stays_where_nobody_else_could_take_it() -> None:
    async with one_runs_and_one_waits() as (serve, made, running, waiting):
        drained = asyncio.create_task(made.engine.drain(30.0))
        await until(lambda: not serve.ledger.can_place(frozenset()))
        made.executor.gate.set()
        assert (await waiting).usage.replica_id == "a"
        await running
        assert await drained


async def test_a_request_is_handed_back_only_before_it_starts() -> None:
    async with one_runs_and_one_waits() as (serve, made, running, waiting), replica() as other:
        assert not made.engine.hand_back("running")
        assert not made.engine.hand_back("unknown")
        serve.join("b", other)
        await until(lambda: serve.ledger.view.is_connected("b"))
        assert not waiting.done()
        assert made.engine.hand_back("waiting")
        assert not made.engine.hand_back("waiting")
        answer = await waiting
        assert (answer.tokens, answer.usage.replica_id) == ([expected_tokens(WAITING, 4)], "b")
        assert not running.done()
        made.executor.gate.set()
        await running
        serve.leave("b")
