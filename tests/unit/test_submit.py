"""A request may come twice, on the feed and as Serve's call: whichever comes first, late or never, it runs once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from fixtures.fake_serve import BLOCK_SIZE, Answer, FakeServe, ask, serving, streaming
from fixtures.replicas import Replica, replica
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve import feed_client, leg, runs, serve_placement
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.feed_messages import Submit, frames_from_gateway
from shoal_cluster.serve.grpc_service import GenerationService
from shoal_cluster.serve.journal import EventKind
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.sent_requests import Follower
from shoal_cluster.serve.serve_placement import ServePlacement
from shoal_protos import generation_pb2
from shoal_replica.errors import EngineDead, ResourceExhausted, Unavailable
from shoal_replica.frames import frame
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.testing import expected_tokens, make_request

PROMPT = tuple(range(10, 31))


@pytest.fixture(autouse=True)
def _called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's calls are made right behind their requests."""
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", 0.0)


@asynccontextmanager
async def gateway(of: Replica) -> AsyncIterator[FeedClient]:
    """Gateway g's end of the feed."""
    client = FeedClient("g", of.address, lambda message: None, lambda: None)
    await until(lambda: of.feed._subscribers)
    try:
        yield client
    finally:
        await client.close()


async def test_a_request_on_the_wire_is_the_same_at_the_other_end() -> None:
    request = make_request("r", PROMPT, max_tokens=7, n=3)
    request = replace(
        request,
        sampling_params=replace(request.sampling_params, stop=("é", "b"), stop_token_ids=(4, 5), seed=2**63 - 1),
        block_hashes=(b"h" * 16, b"\xff" * 16),
        tenant="tenant",
        yields=True,
    )
    [submitted] = frames_from_gateway().take(frame(Submit(request)))
    assert isinstance(submitted, Submit)
    assert replace(submitted.request, prompt_token_ids=tuple(submitted.request.prompt_token_ids)) == request


async def test_a_huge_max_tokens_runs_to_the_models_length() -> None:
    async with replica() as one, gateway(one) as client:
        assert client.submit(make_request("r", PROMPT, max_tokens=10**30))
        await until(lambda: one.runs._kept)
        assert one.recorder.reasons["r", 0] == FinishReason.LENGTH


async def test_submitted_it_runs_before_its_call_and_the_call_joins_it() -> None:
    async with replica() as one, gateway(one) as client:
        one.executor.gate.clear()
        assert client.submit(make_request("r", PROMPT))
        await until(lambda: one.executor.is_held)
        call = one.run("r", "g", prompt_token_ids=PROMPT)
        await until(lambda: one.runs._runs["g", "r"].is_called)
        one.executor.gate.set()
        assert await call == Outcome(refused=False)
        assert one.recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)
        assert one.engine.stats().num_finished == 1
        assert not one.runs._runs


async def test_the_call_comes_first_and_the_frame_behind_it_starts_nothing() -> None:
    async with replica() as one, gateway(one) as client:
        assert await one.run("r", "g", prompt_token_ids=PROMPT) == Outcome(refused=False)
        client.submit(make_request("r", PROMPT))
        await until(lambda: not one.runs._runs)
        assert one.engine.stats().num_finished == 1
        assert one.engine.stats().num_waiting + one.engine.stats().num_running == 0


async def test_a_request_that_has_ended_before_its_call_comes_is_not_run_again() -> None:
    async with replica() as one, gateway(one) as client:
        client.submit(make_request("r", PROMPT))
        await until(lambda: one.runs._kept)
        assert await one.run("r", "g", prompt_token_ids=PROMPT) == Outcome(refused=False)
        assert one.engine.stats().num_finished == 1
        assert not one.runs._runs
        assert not one.runs._kept


async def test_a_refusal_waits_for_its_call() -> None:
    async with replica() as one, gateway(one) as client:
        one.engine._draining = True
        client.submit(make_request("r", PROMPT))
        await until(lambda: one.runs._kept)
        one.engine._draining = False
        assert await one.run("r", "g", prompt_token_ids=PROMPT) == Outcome(True, "the replica is draining")
        assert one.engine.stats().num_waiting + one.engine.stats().num_running == 0


async def test_what_the_engine_cannot_take_is_said_to_the_call_and_the_feed_stays() -> None:
    async with replica() as one, gateway(one) as client:
        client.submit(make_request("long", range(500)))
        await until(lambda: one.runs._kept)
        refusal = await one.run("long", "g", prompt_token_ids=range(500))
        assert (refusal.refused, refusal.field) == (True, "prompt")
        one.executor.failure = RuntimeError("fire")
        client.submit(make_request("r", PROMPT))
        await until(lambda: one.runs._kept)
        with pytest.raises(EngineDead):
            await one.run("r", "g", prompt_token_ids=PROMPT)
        assert "g" in one.feed._subscribers


async def test_an_error_of_the_engine_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica() as one, gateway(one) as client:
        real = one.engine.add

        def add(request: Request, is_held: bool) -> asyncio.Future[None]:
            if request.request_id.startswith("bad"):
                raise OverflowError("a bug")
            return real(request)

        monkeypatch.setattr(one.engine, "add", add)
        client.submit(make_request("bad", PROMPT))
        client.submit(make_request("good", PROMPT))
        await until(lambda: len(one.runs._kept) == 2)
        assert await one.run("good", "g", prompt_token_ids=PROMPT) == Outcome(refused=False)
        for name in ("bad", "bad too"):
            with pytest.raises(OverflowError, match="a bug"):
                await one.run(name, "g", prompt_token_ids=PROMPT)
        assert one.runs._runs.keys() == {("g", "bad too")}
        assert "g" in one.feed._subscribers


async def test_a_request_handed_back_before_its_call_is_refused() -> None:
    async with replica(max_num_seqs=1) as one, gateway(one) as client:
        one.executor.gate.clear()
        running = one.run("running", "g", prompt_token_ids=range(7))
        await until(lambda: one.executor.is_held)
        client.submit(make_request("r", PROMPT))
        client.recall("r")
        await until(lambda: ("g", "r") in one.runs._kept)
        answer = await one.run("r", "g", prompt_token_ids=PROMPT)
        assert answer.refused
        assert "handed the request back" in answer.reason
        one.executor.gate.set()
        await running


@pytest.mark.parametrize("how", ["abort", "feed breaks"])
async def test_given_up_before_its_call_it_ends_and_a_call_after_all_does_not_run_it(how: str) -> None:
    async with replica() as one, gateway(one) as client:
        one.executor.gate.clear()
        client.submit(make_request("r", PROMPT, max_tokens=50, n=2))
        await until(lambda: one.executor.is_held)
        if how == "abort":
            client.abort("r")
        else:
            await client.close()
        await until(lambda: one.runs._kept)
        one.executor.gate.set()
        assert one.engine.stats().num_allocated_blocks == 0
        assert await one.run("r", "g", prompt_token_ids=PROMPT) == Outcome(refused=False)
        assert set(one.recorder.reasons.values()) == {FinishReason.ABORT}


async def test_a_cancelled_call_ends_what_the_feed_brought() -> None:
    async with replica() as one, gateway(one) as client:
        one.executor.gate.clear()
        client.submit(make_request("r", PROMPT, max_tokens=50))
        await until(lambda: one.executor.is_held)
        call = one.run("r", "g", prompt_token_ids=PROMPT)
        await until(lambda: one.runs._runs["g", "r"].is_called)
        call.cancel()
        await until(call.done)
        assert one.engine.stats().num_allocated_blocks == 0
        await until(lambda: not one.runs._runs)
        one.executor.gate.set()


async def test_two_gateways_ids_do_not_meet() -> None:
    async with replica() as one, gateway(one) as client:
        one.executor.gate.clear()
        client.submit(make_request("r", PROMPT))
        await until(lambda: one.executor.is_held)
        reason = "request_id: got 'r'; must not be that of a running request"
        assert await one.run("r", "other") == Outcome(refused=True, reason=reason, field="request_id")
        one.executor.gate.set()
        assert await one.run("r", "g", prompt_token_ids=PROMPT) == Outcome(refused=False)
        assert one.recorder.tokens["r", 0] == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("by", ["feed", "call"])
async def test_a_later_request_of_the_same_id_runs(by: str) -> None:
    async with replica() as one, gateway(one) as client:
        for number, prompt in enumerate((PROMPT, PROMPT[:7]), start=1):
            one.recorder.tokens.clear()
            one.recorder.reasons.clear()
            if by == "feed":
                client.submit(make_request("r", prompt))
                await until(lambda number=number: one.engine.stats().num_finished == number and one.runs._kept)
            else:
                assert await one.run("r", "g", prompt_token_ids=prompt) == Outcome(refused=False)
            assert one.recorder.tokens["r", 0] == expected_tokens(prompt, 4)
        assert one.runs._runs.keys() == one.runs._kept.keys() == {("g", "r")}


async def test_what_came_once_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_KEPT", 3)
    async with replica() as one, gateway(one):
        for i in range(9):
            await one.run(f"r{i}", "g", prompt_token_ids=PROMPT)
        assert [name for _, name in one.runs._kept] == ["r6", "r7", "r8"]
        assert one.runs._runs.keys() == one.runs._kept.keys()
        monkeypatch.setattr(runs, "KEPT_S", 0.0)
        await one.run("last", "g", prompt_token_ids=PROMPT)
        assert [name for _, name in one.runs._kept] == ["last"]


# Through a gateway's ledger


async def test_tokens_do_not_wait_for_serves_call() -> None:
    async with serving("a") as serve:
        serve.may_call.clear()
        answer = Answer()
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=9))) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
                assert not serve.replicas["a"].calls
        assert answer.tokens == [expected_tokens(PROMPT, 9)]
        serve.may_call.set()
        await until(lambda: serve.is_idle)
        assert not serve.placements[0].is_cancelled
        assert serve.replicas["a"].engine.stats().num_finished == 1


async def test_a_client_that_leaves_before_the_call_frees_its_blocks() -> None:
    async with serving("a") as serve:
        serve.may_call.clear()
        made = serve.replicas["a"]
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=50))
        await until(lambda: made.executor.is_held)
        running.cancel()
        await until(lambda: not made.engine.stats().num_allocated_blocks)
        made.executor.gate.set()
        await until(lambda: serve.is_idle)
        assert not made.calls


@pytest.mark.parametrize("how", ["feed breaks", "Serve takes it away", "dies"])
@pytest.mark.parametrize("num_taken", [0, 5])
async def test_a_replica_lost_before_the_call_leaves_no_gap_and_no_repeat(how: str, num_taken: int) -> None:
    async with serving("a", "b") as serve:
        serve.may_call.clear()
        answer = Answer()
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=40))) as chunks:
            while sum(map(len, answer.tokens)) < num_taken:
                answer.take(await anext(chunks))
            if not num_taken:
                first = asyncio.ensure_future(anext(chunks))
                await until(lambda: any(sent.replica_id for _, sent in serve.ledger.sent))
            name = serve.taken_by("call")
            lost = serve.replicas[name]
            lost.executor.gate.clear()
            if how == "feed breaks":
                await until(lambda: "gateway" in lost.feed._subscribers)
                lost.feed._subscribers["gateway"].transport.abort()
            elif how == "dies":
                await serve.leave(name).die()
            else:
                serve.leave(name)
            lost.executor.gate.set()
            if not num_taken:
                answer.take(await first)
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [expected_tokens(PROMPT, 40)]
        await until(lambda: not lost.engine.stats().num_allocated_blocks)
        serve.may_call.set()


async def test_a_refusal_by_the_feed_goes_to_the_next_rank() -> None:
    async with serving("a", "b") as serve:
        serve.may_call.clear()
        warm = (await ask(serve, "warm", prompt_token_ids=PROMPT)).usage.replica_id
        serve.replicas[warm].engine._draining = True  # and no gateway has been told
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        answer = await running
        assert not any(one.calls for one in serve.replicas.values())
        serve.may_call.set()
        assert [leg.routed_s is None for leg in serve.times[-1].legs] == [True, False]
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert (answer.usage.replica_id != warm, answer.usage.num_resumes) == (True, 0)


async def test_a_hand_back_by_the_feed_goes_to_the_next_rank() -> None:
    async with serving("a", "b", max_num_seqs=1) as serve:
        held = serve.replicas["a"]
        held.executor.gate.clear()
        running = held.run("running", "gateway", prompt_token_ids=range(7))
        await until(lambda: held.executor.is_held)
        serve.may_call.clear()
        other = serve.leave("b")
        asked = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: ("gateway", "call") in held.runs._runs)
        serve.join("b", other)
        await until(lambda: serve.ledger.can_place({"a"}))
        serve.ledger.recalls.recall("a")
        answer = await asked
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert (answer.usage.replica_id, answer.usage.num_resumes) == ("b", 0)
        serve.may_call.set()
        held.executor.gate.set()
        await running


async def test_a_request_that_no_replica_takes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("a") as serve:
        serve.may_call.clear()
        monkeypatch.setattr(serve.replicas["a"].feed, "on_submit", lambda request, gateway_id, source: None)
        generation = serve.generation(make_request(), placement_timeout_s=0.05)
        with pytest.raises(Unavailable, match=r"no replica could take the request within 0\.05 s"):
            async with streaming(generation) as chunks:
                await anext(chunks)
        assert serve.times[0].legs[0].routed_s is None
        serve.may_call.set()


async def test_a_request_whose_replica_serve_stops_before_the_call_goes_on_there() -> None:
    async with serving("a", "b") as serve:
        serve.may_call.clear()
        for one in serve.replicas.values():
            one.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6, n=3))
        await until(lambda: any(one.executor.is_held for one in serve.replicas.values()))
        name = serve.taken_by("call")
        left = serve.leave(name)
        assert serve.ledger.ranks("call") == ()  # Serve asks again, and is to call nobody
        for one in (left, *serve.replicas.values()):
            one.executor.gate.set()
        answer = await running
        assert answer.tokens == [expected_tokens(PROMPT, 6, index) for index in range(3)]
        assert (answer.usage.replica_id, answer.usage.num_resumes) == (name, 0)
        assert len(serve.placements) == 1
        assert not [event for event in serve.ledger.journal.last(99) if event.kind is EventKind.RESUMED]
        await until(lambda: not left.engine.stats().num_allocated_blocks)
        serve.may_call.set()


@pytest.mark.parametrize("is_called", [False, True])
async def test_an_error_in_taking_a_request_is_told_at_once(is_called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", 0.0 if is_called else 10 * DEADLINE_S)
    async with serving("a", "b") as serve:
        dispatcher = serve.hold()

        def send(request: Request, source: object) -> Response:
            [name] = serve.ledger.ranks(request.request_id)
            return Response(asyncio.ensure_future(serve.replicas[name].call(request, serve.ledger.gateway_id)))

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        def fail(*args: object) -> None:
            raise OverflowError("a bug")

        serve.place = place  # type: ignore[method-assign, assignment]
        for one in serve.replicas.values():
            monkeypatch.setattr(one.engine, "add", fail)
        with pytest.raises(Unavailable, match="OverflowError"):
            await ask(serve, prompt_token_ids=PROMPT)


async def test_an_id_that_is_submitted_again_right_behind_its_abort_is_another_request() -> None:
    async with replica() as one:
        told = list[TokenDelta]()
        client = FeedClient("g", one.address, lambda _: None, lambda: None, lambda update: told.extend(update.deltas))
        await until(lambda: one.feed._subscribers)
        one.executor.gate.clear()
        assert client.submit(make_request("r", PROMPT, max_tokens=6))
        await until(lambda: one.executor.is_held)
        client.abort("r")
        assert client.submit(make_request("r", PROMPT, max_tokens=3))
        await until(lambda: one.recorder.reasons)
        one.recorder.reasons.clear()  # it takes ids to be used once
        one.executor.gate.set()
        await until(lambda: told and told[-1].finish_reason is not None)
        assert [token_id for delta in told for token_id in delta.token_ids] == expected_tokens(PROMPT, 3)
        assert {delta.finish_reason for delta in told} == {None, FinishReason.LENGTH}
        await client.close()


async def test_a_request_clearly_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica() as one, gateway(one) as client:
        monkeypatch.setattr(feed_client, "MAX_REQUEST_BYTES", 63)
        with monkeypatch.context() as patch:
            patch.setattr(feed_client, "frame", None)
            assert not client.submit(make_request("r", range(22)))
            assert not client.submit(replace(make_request("r"), block_hashes=(b"h" * 16,) * 4))
        assert not client.submit(make_request("r", range(20)))  # its other fields make it too long
        await client.close()
        await until(lambda: client._connection is None)
        monkeypatch.setattr(feed_client, "frame", None)
        assert not client.submit(make_request("r", range(20)))


async def test_a_request_too_long_for_the_feed_goes_by_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_client, "MAX_REQUEST_BYTES", 64)
    async with serving("a") as serve:
        answer = await ask(serve, prompt_token_ids=PROMPT)
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert not any(run.is_submitted for run in serve.replicas["a"].runs._runs.values())


class Core:
    """As much of a gateway as gRPC's Generate needs."""

    def __init__(self, serve: FakeServe) -> None:
        self.serve = serve

    def authenticate(self, authorization: str | None) -> None:
        """Everybody may call."""

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        assert call.token_ids is not None
        request = make_request(call.request_id, call.token_ids)
        async with streaming(self.serve.generation(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class Context:
    """gRPC's context of one call; notes whether the request was submitted before the client heard anything."""

    def __init__(self, submitted: Callable[[], bool]) -> None:
        self.submitted = submitted
        self.events: list[str] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float:
        return DEADLINE_S

    async def send_initial_metadata(self, metadata: object) -> None:
        self.events += ["submitted"] * self.submitted() + ["id"]

    async def write(self, response: object) -> None:
        self.events.append("chunk")


async def test_the_request_goes_before_its_client_hears_of_it() -> None:
    async with serving("a") as serve:
        serve.hold()
        context = Context(lambda: any(sent.submitted_to for _, sent in serve.ledger.sent))
        asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT))
        service = GenerationService(cast("Any", Core(serve)), max_call_s=60)
        await service.generate(asked.SerializeToString(), cast("Any", context))
        assert context.events[:3] == ["submitted", "id", "chunk"]


class Response:
    """A call as Serve's handle returns it."""

    def __init__(self, ends: asyncio.Future[Outcome]) -> None:
        self.ends = ends
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self.ends.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("how", ["returns", "is cancelled", "fails", "cannot be made"])
async def test_serves_call_follows_where_the_request_went_and_its_failure_takes_it_back(how: str) -> None:
    async with serving("a", "b") as serve:
        made, calls = serve.replicas, list[Response]()

        def send(request: Request, source: object) -> Response:
            if how == "cannot be made":
                raise ResourceExhausted("no")
            [name] = serve.ledger.ranks(request.request_id)
            assert serve.replica_of(request.request_id) == name
            calls.append(Response(asyncio.get_running_loop().create_future()))
            return calls[-1]

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        dispatcher = serve.hold()
        serve.place = place  # type: ignore[method-assign, assignment]
        for one in made.values():
            one.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6))
        await until(lambda: how == "cannot be made" or (calls and any(one.executor.is_held for one in made.values())))
        if how == "is cancelled":
            running.cancel()
            await until(running.done)
            assert calls[0].is_cancelled
        elif how == "fails":
            calls[0].ends.set_exception(ConnectionError("gone"))
            await until(lambda: len(calls) == 2)
        elif how == "cannot be made":
            with pytest.raises(Unavailable, match=r"resumed 3 times: .*ResourceExhausted"):
                await running
        if how != "returns":
            num_left = int(how == "fails")
            await until(lambda: sum(len(one.engine._finished) for one in made.values()) == num_left)
        for one in made.values():
            one.executor.gate.set()
        if how in ("returns", "fails"):
            await until(lambda: any(one.runs._kept for one in made.values()))
            calls[-1].ends.set_result(Outcome(refused=False))
            assert (await running).tokens == [expected_tokens(PROMPT, 6)]
            assert not calls[-1].is_cancelled


@pytest.mark.parametrize("how", ["ends", "is refused", "is left", "goes on where Serve stops its replica"])
async def test_what_becomes_of_a_request_before_serves_call_is_made_waits_for_no_call(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_after_s = 0.05 if how.startswith("goes on") else 10 * DEADLINE_S
    monkeypatch.setattr(serve_placement, "CALL_AFTER_S", call_after_s)
    monkeypatch.setattr(leg, "GRACE_S", 0.0)
    async with serving("a") as serve:
        made, calls, dispatcher = serve.replicas["a"], list[Request](), serve.hold()
        aborted, abort = list[str](), made.engine.abort

        def note_abort(request_id: str, *args: Any) -> None:
            aborted.append(request_id)
            abort(request_id, *args)

        monkeypatch.setattr(made.engine, "abort", note_abort)

        def send(request: Request, source: object) -> None:
            calls.append(request)

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        serve.place = place  # type: ignore[method-assign, assignment]
        if how == "is refused":
            made.engine._draining = True
        elif how != "ends":
            made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6))
        if how == "is refused":
            await until(lambda: dispatcher.num_held == 1)  # it waits for another replica
            running.cancel()
            await until(running.done)
        elif how == "is left":
            await until(lambda: made.executor.is_held)
            running.cancel()
            await until(lambda: not made.engine._finished)
            made.executor.gate.set()
            assert aborted
        else:
            if how != "ends":
                await until(lambda: made.executor.is_held)
                serve.leave("a")
                await asyncio.sleep(3 * call_after_s)
                made.executor.gate.set()
            answer = await running
            assert answer.tokens == [expected_tokens(PROMPT, 6)]
            assert answer.usage.num_resumes == 0
        await until(lambda: not len(serve.ledger.sent))
        assert not calls
        if how != "is left":
            await made.engine.drain(DEADLINE_S)
            assert not aborted
        serve.replicas["a"] = made


async def test_of_a_burst_those_are_refused_that_there_is_no_room_for() -> None:
    async with serving("a", max_num_seqs=1, num_blocks=512) as serve:
        made, dispatcher = serve.replicas["a"], serve.hold(AdmissionLimits(max_waiting_requests=10))

        def send(request: Request, source: object) -> Response:
            return Response(asyncio.ensure_future(made.call(request, serve.ledger.gateway_id)))

        def place(request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
            pending = PendingRequest(query=query, arrival_s=0.0)
            return ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))

        serve.place = place  # type: ignore[method-assign, assignment]
        made.executor.gate.clear()
        first = asyncio.create_task(ask(serve, "first", prompt_token_ids=PROMPT))
        await until(lambda: made.executor.is_held)
        burst = [
            asyncio.create_task(ask(serve, f"r{i}", prompt_token_ids=range(100 * i, 100 * i + 20))) for i in range(20)
        ]
        await until(lambda: dispatcher.num_held + sum(call.done() for call in burst) == 20)
        num_held = dispatcher.num_held
        assert 9 <= num_held <= 10  # as far as its gateway knows, the first one may still wait too
        made.executor.gate.set()
        outcomes = await asyncio.gather(first, *burst, return_exceptions=True)
        assert sum(isinstance(outcome, ResourceExhausted) for outcome in outcomes) == 20 - num_held


async def test_what_can_start_is_on_its_way_at_once_and_taken_back_if_nobody_waits_for_it() -> None:
    async with serving("a") as serve:
        made, calls = serve.replicas["a"], list[Request]()
        dispatcher, request = serve.hold(), make_request(prompt_token_ids=PROMPT)
        made.executor.gate.clear()
        query = RouteQuery.for_request(request, BLOCK_SIZE)
        pending = PendingRequest(query=query, arrival_s=0.0)

        def send(request: Request, source: object) -> None:
            calls.append(request)

        placement = ServePlacement(serve.ledger, dispatcher, request, pending, cast("Any", send))
        ignored = Follower()
        serve.ledger.follow(request.request_id, ignored)
        outcome = placement.start()
        assert serve.replica_of(request.request_id) == "a"
        placement.cancel()  # before its task has begun
        await until(lambda: bool(made.runs._kept))
        assert outcome.cancelled()
        assert not calls
        assert dispatcher.num_held == 0
        serve.ledger.unfollow(request.request_id)
