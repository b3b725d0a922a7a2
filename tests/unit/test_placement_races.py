"""Races in placement: whatever comes in the few turns of the event loop before an end is noticed, nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fixtures.fake_serve import ask, serving
from fixtures.serve_calls import Response
from fixtures.waiting import until

from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve import serve_placement
from shoal_cluster.serve.generation import Generation
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.serve_placement import ServePlacement
from shoal_replica.errors import DeadlineExceeded
from shoal_replica.request import Request
from shoal_replica.testing import expected_tokens


@pytest.fixture(autouse=True, params=[0.0, serve_placement.CALL_AFTER_S])
def _called_after(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's calls are made right behind their requests, or not before these have ended."""
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", request.param)


PROMPT = tuple(range(10, 31))


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("what", ["left", "deadline", "feed breaks", "taken away"])
async def test_whatever_comes_between_a_turn_and_what_is_sent(what: str, num_turns: int) -> None:
    async with serving("a", "b", max_num_seqs=1) as serve:
        dispatcher, generations = serve.hold(), list[Generation]()

        def send(request: Request, source: object) -> Response:
            return Response(asyncio.ensure_future(route(request)))

        async def route(request: Request) -> Outcome:
            """As Serve does: ask again, with pauses, until some replica may have the call."""

            def takers() -> list[str]:
                return [r for r in serve.ledger.ranks(request.request_id)[:1] if r in serve.replicas]

            await until(takers)
            return await serve.replicas[takers()[0]].call(request, serve.ledger.gateway_id)

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        serve.place = place  # type: ignore[method-assign, assignment]
        real, given = serve.generation, asyncio.Event()

        def generation(request: Request) -> Generation:
            generations.append(real(request))
            return generations[-1]

        serve.generation = generation  # type: ignore[method-assign, assignment]
        for made in serve.replicas.values():
            made.executor.gate.clear()
        first = [asyncio.create_task(ask(serve, f"f{i}", prompt_token_ids=range(99 * i, 99 * i + 9))) for i in (1, 2)]
        await until(lambda: all(made.executor.is_held for made in serve.replicas.values()))
        held = asyncio.create_task(ask(serve, "held", prompt_token_ids=PROMPT))
        await until(lambda: dispatcher.num_held == 1)
        commit, best = serve.ledger.commit, list[str]()

        def note(dispatch: Any) -> None:
            commit(dispatch)
            best.append(dispatch.decision.best)
            given.set()

        serve.ledger.commit = note  # type: ignore[method-assign]
        for made in serve.replicas.values():
            made.executor.gate.set()
        await given.wait()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if what == "left":
            held.cancel()
        elif what == "deadline":
            generations[-1].fail(DeadlineExceeded("late"))
        elif what == "feed breaks":
            serve.replicas[best[0]].feed._subscribers["gateway"].transport.abort()
        else:
            left = serve.leave(best[0])
        done = await asyncio.gather(held, return_exceptions=True)
        if what == "left":
            assert isinstance(done[0], asyncio.CancelledError)
        elif what == "deadline":
            assert isinstance(done[0], DeadlineExceeded)
        else:
            assert not isinstance(done[0], BaseException), done
            assert done[0].tokens == [expected_tokens(PROMPT, 4)]
        await asyncio.gather(*first, return_exceptions=True)
        assert dispatcher.num_held == 0
        assert not dispatcher._waiters
        if what == "taken away":
            serve.replicas[best[0]] = left
        await until(lambda: serve.is_idle)
        if what == "taken away":
            del serve.replicas[best[0]]


@pytest.mark.parametrize("num_turns", range(8))
async def test_who_leaves_the_queue_and_comes_again_under_the_same_id_gets_a_turn(num_turns: int) -> None:
    """Cleaning up after the first request takes nothing from the second."""
    async with serving("a", max_num_seqs=1) as serve:
        made, dispatcher = serve.replicas["a"], serve.hold()

        def send(request: Request, source: object) -> Response:
            return Response(asyncio.ensure_future(made.call(request, serve.ledger.gateway_id)))

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        serve.place = place  # type: ignore[method-assign, assignment]
        made.executor.gate.clear()
        first = asyncio.create_task(ask(serve, "first", prompt_token_ids=range(9)))
        await until(lambda: made.executor.is_held)
        leaves = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: dispatcher.num_held == 1)
        leaves.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        again = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        for _ in range(20):
            await asyncio.sleep(0)
        made.executor.gate.set()
        assert (await again).tokens == [expected_tokens(PROMPT, 4)]
        await first


async def test_a_call_that_can_go_nowhere_any_more_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would ask on and on where it must go, one of the few for which it does so at a time; the request goes on
    at the replica that Serve stops.
    """
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", 0.0)
    async with serving("a") as serve:
        made, dispatcher, calls = serve.replicas["a"], serve.hold(), list[asyncio.Future[Outcome]]()

        def send(request: Request, source: object) -> Response:
            calls.append(asyncio.get_running_loop().create_future())
            return Response(calls[-1])

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        serve.place = place  # type: ignore[method-assign, assignment]
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: bool(calls) and made.executor.is_held)
        assert serve.ledger.ranks("call") == ("a",)
        serve.leave("a")
        assert serve.ledger.ranks("call") == ()
        assert calls[0].cancelled()
        made.executor.gate.set()
        answer = await running
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert answer.usage.num_resumes == 0
        serve.replicas["a"] = made
