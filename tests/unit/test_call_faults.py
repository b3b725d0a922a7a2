"""A fault beside a call must not fail it, and a fault in a call must fail nothing else."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fixtures.fake_serve import NumberTokenizer, ask, serving, streaming
from fixtures.serve_calls import Response
from fixtures.waiting import until

from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve import avoided, serve_placement
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.serve_placement import ServePlacement
from shoal_replica.errors import DeadlineExceeded
from shoal_replica.request import Request
from shoal_replica.testing import expected_tokens, make_request


@pytest.fixture(autouse=True)
def _called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's calls are made right behind their requests."""
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", 0.0)


PROMPT = tuple(range(10, 31))


async def test_a_replica_that_does_not_know_the_gateway_for_a_while_costs_no_call() -> None:
    """It has lost the feed and the gateway has not noticed, so each attempt is refused at once."""
    async with serving("a") as serve:
        serve.hold()
        serve.submits = False
        subscribers = serve.replicas["a"].feed._subscribers
        away = subscribers.pop("gateway")
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=9))
        await asyncio.sleep(0.3)
        assert not call.done(), "it may well run as soon as the feed is back"
        subscribers["gateway"] = away
        assert (await call).tokens == [expected_tokens(PROMPT, 9)]


async def test_a_deadline_frees_the_blocks_of_a_call_whose_client_does_not_read() -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=90)), timeout_s=1.0) as chunks:
            await anext(chunks)
            made.executor.gate.clear()
            await until(lambda: made.executor.is_held)
            assert made.engine.stats().num_allocated_blocks
            await until(lambda: not made.calls)  # its deadline passes, and nobody reads
            assert not made.engine.stats().num_allocated_blocks
            with pytest.raises(DeadlineExceeded):
                async for _ in chunks:
                    pass


async def test_a_call_that_breaks_off_at_the_only_replica_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's connection to a healthy replica may break (ActorUnavailableError)."""
    async with serving("a") as serve:
        made, calls = serve.replicas["a"], list[Response]()

        def send(request: Request, source: object) -> Response:
            calls.append(Response(asyncio.get_running_loop().create_future()))
            return calls[-1]

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        dispatcher = serve.hold(patience_s=0.5)
        monkeypatch.setattr(avoided, "GONE_S", 0.1)
        serve.place = place  # type: ignore[method-assign, assignment]
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6))
        await until(lambda: calls and made.executor.is_held)
        calls[0].ends.set_exception(ConnectionError("gone"))
        await until(lambda: not made.engine._finished)
        made.executor.gate.set()
        await until(lambda: running.done() or (len(calls) == 2 and made.runs._kept))
        if len(calls) == 2:
            calls[1].ends.set_result(Outcome(refused=False))
        assert (await running).tokens == [expected_tokens(PROMPT, 6)]


async def test_a_call_whose_tokens_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = expected_tokens(PROMPT, 4)[2]
    real = NumberTokenizer.decode

    def decode(self: NumberTokenizer, token_ids: Any, skip_special_tokens: bool = True) -> str:
        if bad in token_ids and broken:
            raise OverflowError("a bug")
        return real(self, token_ids, skip_special_tokens)

    broken = True
    monkeypatch.setattr(NumberTokenizer, "decode", decode)
    async with serving("a") as serve:
        made = serve.replicas["a"]
        made.executor.gate.clear()
        other = asyncio.create_task(ask(serve, "other", prompt_token_ids=(1, 2, 3), max_tokens=20))
        await until(lambda: made.executor.is_held)
        assert bad not in expected_tokens((1, 2, 3), 20)
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: made.engine.stats().num_waiting)
        made.executor.gate.set()
        try:
            with pytest.raises(OverflowError):
                async with asyncio.timeout(3.0):
                    await call
            async with asyncio.timeout(3.0):
                answer = await other
            assert answer.tokens == [expected_tokens((1, 2, 3), 20)]
            assert answer.usage.num_resumes == 0
            serve.ledger.check_health()
        finally:
            broken = False
            for task in (call, other):
                task.cancel()
            await asyncio.wait([call, other])
            serve.leave("a")
