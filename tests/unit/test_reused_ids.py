"""Ids that clients use again as soon as they have given a request up: nothing of the first one reaches the second."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fixtures.fake_serve import FakeServe, ask, serving
from fixtures.serve_calls import Response
from fixtures.waiting import until

from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import sent_requests
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.sent_requests import Follower
from shoal_cluster.serve.serve_placement import ServePlacement
from shoal_replica.request import Request, TokenDelta
from shoal_replica.testing import expected_tokens

FIRST, AGAIN = tuple(range(10, 31)), tuple(range(40, 61))


def place_as_serve_does(serve: FakeServe) -> None:
    dispatcher = serve.hold()

    async def call(request: Request) -> Outcome:
        (name,) = serve.ledger.ranks(request.request_id)
        return await serve.replicas[name].call(request, serve.ledger.gateway_id)

    def send(request: Request, source: object) -> Response:
        return Response(asyncio.ensure_future(call(request)))

    def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
        pending = PendingRequest(query=query, arrival_s=0.0)
        return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

    serve.place = place  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_request_comes_behind_the_abort_of_the_one_before(num_turns: int) -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        made.engine._reports._subscribers.remove(made.recorder)  # which knows one request of an id
        place_as_serve_does(serve)
        made.executor.gate.clear()
        first = asyncio.create_task(ask(serve, prompt_token_ids=FIRST, max_tokens=20))
        await until(lambda: made.executor.is_held)
        ended = made.engine._finished["call"]
        first.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        again = asyncio.create_task(ask(serve, prompt_token_ids=AGAIN, max_tokens=5))
        await until(lambda: made.engine._finished.get("call", ended) is not ended)  # tokens before that are stale
        made.executor.gate.set()
        answer = await again
        assert answer.tokens == [expected_tokens(AGAIN, 5)]
        assert answer.usage.num_resumes == 0


async def test_tokens_of_a_sequence_that_was_not_asked_for_do_not_end_the_feed() -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        place_as_serve_does(serve)
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=FIRST, max_tokens=5))
        await until(lambda: made.executor.is_held)
        stale = TokenDelta(request_id="call", index=2, position=0, token_ids=(1,), num_cached_tokens=0)
        serve.follower_of("call").take("a", stale)
        made.executor.gate.set()
        assert (await running).tokens == [expected_tokens(FIRST, 5)]
        serve.ledger.check_health()


async def test_what_has_ended_lately_is_remembered_longer_than_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as messages of it may be under way; but not what was given up before any replica had it."""
    monkeypatch.setattr(sent_requests, "MAX_ENDED", 2)
    ledger = GatewayLedger("gateway", RouteWeights())
    for call_id in ("old", "resumed", "held", "new"):
        request_id = f"{call_id}#2" if call_id == "resumed" else call_id
        ledger.follow(request_id, Follower())
        if call_id != "held":
            ledger.routed(request_id, "a")
        if call_id != "resumed":
            assert ledger.has_used(call_id)
        ledger.unfollow(request_id)
    known = [call_id for call_id in ("old", "resumed", "held", "new") if ledger.has_used(call_id)]
    assert known == ["resumed", "new"]
    assert not ledger.knows_call("ne")
