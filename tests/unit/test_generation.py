"""The life of a call: whatever happens to replicas, the client gets each token once, or one clear error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from fixtures.fake_serve import Answer, FakePlacement, FakeServe, ask, serving, streaming
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.serve import feed_client, leg
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.route_log import MAX_RECORDS_PER_REQUEST
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.finish_rule import FinishRule
from shoal_replica.request import Request, TokenDelta
from shoal_replica.testing import expected_beams, expected_prompt_logprobs, expected_tokens, make_request

PROMPT = tuple(range(10, 31))


def text_of(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def stopping(text: str, **fields: object) -> Request:
    request = make_request("call", PROMPT, **fields)  # type: ignore[arg-type]
    return replace(request, sampling_params=replace(request.sampling_params, stop=(text,)))


async def test_a_token_that_ends_a_sequence_is_not_in_its_text() -> None:
    tokens = expected_tokens(PROMPT, 9)
    request = make_request("call", PROMPT, max_tokens=9)
    request = replace(request, sampling_params=replace(request.sampling_params, stop_token_ids=(tokens[5],)))
    async with serving("a") as serve:
        answer = Answer()
        async with streaming(serve.generation(request)) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
    assert (answer.tokens, answer.texts, answer.reasons) == ([tokens[:6]], [text_of(tokens[:5])], ["stop"])


async def test_a_call_from_end_to_end() -> None:
    async with serving("a", "b") as serve:
        answer = await ask(serve, prompt_token_ids=PROMPT, max_tokens=9)
        tokens = expected_tokens(PROMPT, 9)
        assert answer.tokens == [tokens]
        assert answer.texts == [text_of(tokens)]
        assert answer.reasons == ["length"]
        usage = answer.usage
        assert usage is not None
        assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (21, 0, 9)
        assert (usage.replica_id, usage.num_resumes) == (serve.taken_by("call"), 0)
        assert usage.ttft_s > 0


async def test_every_token_is_timed_once() -> None:
    async with serving("a", "b") as serve:
        await ask(serve, "one", prompt_token_ids=PROMPT, max_tokens=12, n=3)
        await ask(serve, "two", max_tokens=1)
        latency = serve.latency.summary(time.monotonic())
        assert latency.ttft is not None
        assert latency.inter_token is not None
        assert (latency.ttft.num, latency.inter_token.num) == (2, 3 * 11)


async def test_a_finished_call_is_left_to_return() -> None:
    """Cancelling it would make Serve count a failure."""
    async with serving("a") as serve:
        await ask(serve, "one", max_tokens=1)
        await ask(serve, "two", max_tokens=9, n=3)
        await until(lambda: serve.is_idle)
        assert not any(placement.is_cancelled for placement in serve.placements)


async def test_the_same_prompt_goes_where_it_is_cached() -> None:
    async with serving("a", "b", "c") as serve:
        first = await ask(serve, "one", prompt_token_ids=PROMPT)
        await until(lambda: serve.is_idle)
        second = await ask(serve, "two", prompt_token_ids=PROMPT)
        assert second.usage.replica_id == first.usage.replica_id
        assert second.usage.num_cached_tokens == 20
        assert second.tokens == first.tokens


async def test_several_sequences() -> None:
    async with serving("a", "b") as serve:
        answer = await ask(serve, prompt_token_ids=PROMPT, max_tokens=12, n=3)
        assert answer.tokens == [expected_tokens(PROMPT, 12, index) for index in range(3)]
        assert answer.reasons == ["length"] * 3
        assert answer.usage.num_output_tokens == 36
        assert len(serve.placements) == 1


async def test_a_stop_string_ends_the_sequence_at_the_replica() -> None:
    async with serving("a") as serve:
        tokens = expected_tokens(PROMPT, 90)
        answer = Answer()
        async with streaming(serve.generation(stopping(f" {tokens[5]} ", max_tokens=90))) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.texts == [text_of(tokens[:5])[:-1]]
        assert answer.tokens == [tokens[:6]]
        assert (answer.reasons, answer.stop_reasons) == (["stop"], [f" {tokens[5]} "])
        await until(lambda: serve.is_idle)
        assert serve.replicas["a"].engine.stats().num_generated_tokens < 90
        assert not serve.placements[0].is_cancelled


async def test_one_of_several_may_stop_early() -> None:
    async with serving("a") as serve:
        tokens = [expected_tokens(PROMPT, 90, index) for index in range(3)]
        answer = Answer(3)
        async with streaming(serve.generation(stopping(f" {tokens[1][3]} ", max_tokens=90, n=3))) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.reasons == ["length", "stop", "length"]
        assert answer.stop_reasons == [None, f" {tokens[1][3]} ", None]
        assert answer.tokens == [tokens[0], tokens[1][:4], tokens[2]]
        assert serve.replicas["a"].engine.stats().num_generated_tokens < 270


async def test_a_stop_that_did_not_come_is_text() -> None:
    """Text that was held back as a possible stop string is released in the end."""
    async with serving("a") as serve:
        tokens = expected_tokens(PROMPT, 4)
        answer = Answer()
        async with streaming(serve.generation(stopping(f"{tokens[3]} !", max_tokens=4))) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
        assert (answer.texts, answer.reasons) == ([text_of(tokens)], ["length"])


async def test_a_slow_client_gets_everything() -> None:
    async with serving("a") as serve:
        answer, call = Answer(), serve.generation(make_request("call", PROMPT, max_tokens=20))
        async with streaming(call) as chunks:
            answer.take(await anext(chunks))
            await until(lambda: call._outputs.is_done)
            async for chunk in chunks:
                answer.take(chunk)
        assert (answer.tokens, answer.reasons) == ([expected_tokens(PROMPT, 20)], ["length"])
        assert answer.usage is not None


async def test_what_a_client_has_not_read_comes_in_messages_that_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_cluster.serve.outputs.MAX_MERGED", 4)
    async with serving("a") as serve:
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=20))) as chunks:
            await anext(chunks)
            await until(lambda: serve.replicas["a"].engine.stats().num_finished)
            sizes = [len(chunk.token_ids) async for chunk in chunks]
        assert sum(sizes) >= 16
        assert max(sizes) == 4


# Refusals


async def test_a_refusal_goes_to_the_next_rank() -> None:
    async with serving("a", "b") as serve:
        warm = (await ask(serve, "warm", prompt_token_ids=PROMPT)).usage.replica_id
        serve.replicas[warm].engine._draining = True  # but nobody has been told
        answer = await ask(serve, prompt_token_ids=PROMPT)
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert answer.usage.replica_id != warm
        assert answer.usage.num_resumes == 0
        first, second = serve.ledger.routes.of_call("call")
        assert first.decision.ranked[0] == warm
        assert second.query.excluded == {warm}


async def test_refused_by_all_for_want_of_room_is_said_at_once() -> None:
    async with serving("a", "b", max_num_seqs=1, max_num_waiting=1) as serve:
        for made in serve.replicas.values():
            made.executor.gate.clear()
        others = []
        for number in range(4):  # two at each
            others.append(asyncio.create_task(ask(serve, f"other-{number}")))
            await until(lambda number=number: sum(len(m.engine._finished) for m in serve.replicas.values()) > number)
        num_before = len(serve.placements)
        with pytest.raises(ResourceExhausted, match="refused by 2 replicas: 1 sequences are waiting") as caught:
            await ask(serve)
        assert caught.value.retry_after_s
        assert len(serve.placements) == num_before + 2
        for made in serve.replicas.values():
            made.executor.gate.set()
        await asyncio.gather(*others)
        kept = serve.ledger.routes.refusal_of("call")
        assert kept is not None
        assert (kept.reason, kept.retry_after_s) == (str(caught.value), caught.value.retry_after_s)


@pytest.mark.parametrize("told_by", ["call", "feed"])
async def test_an_id_that_another_gateway_has_in_use_is_said_at_once(told_by: str) -> None:
    async with serving("a", "b") as serve, asyncio.timeout(2 * DEADLINE_S):
        if told_by == "feed":
            serve.may_call.clear()
        else:
            serve.submits = False
        others = [FeedClient("other", m.address, lambda message: None, lambda: None) for m in serve.replicas.values()]
        try:
            for made in serve.replicas.values():
                await until(lambda made=made: "other" in made.feed._subscribers)
                made.executor.gate.clear()
                made.run("call", "other")
            await until(lambda: all(made.executor.is_held for made in serve.replicas.values()))
            generation = serve.generation(make_request("call"))
            with pytest.raises(InvalidArgument, match="'call'; must not be that of a running request") as caught:
                async with streaming(generation) as chunks:
                    await anext(chunks)
            assert caught.value.field == "request_id"
            assert (generation.num_resumes, len(serve.placements)) == (0, 1)
            for made in serve.replicas.values():
                made.executor.gate.set()
            await until(lambda: all(made.recorder.reasons for made in serve.replicas.values()))
            assert [m.recorder.tokens["call", 0] for m in serve.replicas.values()] == [
                expected_tokens((1, 2, 3), 4)
            ] * 2
        finally:
            for other in others:
                await other.close()


# Losses


async def _crash(serve: FakeServe, name: str) -> None:
    await serve.leave(name).die()


async def _silent_crash(serve: FakeServe, name: str) -> None:
    """The actor is dead, and Serve does not know yet."""
    await serve.replicas[name].die()


async def _feed_breaks(serve: FakeServe, name: str) -> None:
    serve.replicas[name].feed._subscribers["gateway"].transport.abort()


async def _engine_fails(serve: FakeServe, name: str) -> None:
    serve.replicas[name].executor.failure = RuntimeError("fire")


async def _stops(serve: FakeServe, name: str) -> None:
    serve.replicas[name].executor.gate.set()
    await serve.replicas[name].engine.stop()


async def _leaves_and_stops(serve: FakeServe, name: str) -> None:
    """Serve no longer waits for the draining replica and stops it."""
    left = serve.leave(name)
    left.executor.gate.set()
    await left.engine.stop()


LOSSES = [_crash, _silent_crash, _feed_breaks, _engine_fails, _stops, _leaves_and_stops]


async def test_a_call_that_finds_no_feed_of_its_gateway_goes_there_again_when_it_is_back() -> None:
    """There is no other replica, and this one is not full."""
    async with serving("a") as serve:
        serve.hold()
        serve.submits = False
        serve.may_call.clear()
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=9))
        await until(lambda: serve.placements and serve.placements[0].wants == "a")
        await _feed_breaks(serve, "a")
        await until(lambda: not serve.replicas["a"].feed._subscribers)
        serve.may_call.set()
        assert (await call).tokens == [expected_tokens(PROMPT, 9)]
        assert len(serve.placements) == 2


Lose = Callable[[FakeServe, str], Awaitable[None]]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lose", LOSSES)
async def test_a_lost_replica_leaves_no_gap_and_no_repeat(lose: Lose, n: int) -> None:
    async with serving("a", "b") as serve:
        answer = Answer(n)
        request = make_request("call", PROMPT, max_tokens=40, n=n)
        async with streaming(serve.generation(request)) as chunks:
            for _ in range(5):
                answer.take(await anext(chunks))
            name = serve.taken_by("call")
            lost = serve.replicas[name]
            lost.executor.gate.clear()
            await until(lambda: lost.executor.is_held)
            await lose(serve, name)
            lost.executor.gate.set()
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [expected_tokens(PROMPT, 40, index) for index in range(n)]
        assert answer.texts == [text_of(tokens) for tokens in answer.tokens]
        assert answer.reasons == ["length"] * n
        assert [leg.end for leg in serve.times[0].legs] == ["lost", *[""] * n]
        assert answer.usage.num_resumes == 1
        if lose is not _feed_breaks:
            assert answer.usage.replica_id != name
            assert all(r.decision.ranked[0] != name for r in serve.ledger.routes.of_call("call")[1:])


@pytest.mark.parametrize("is_caching", [True, False])
async def test_where_nothing_is_cached_a_resumed_call_asks_for_no_blocks(is_caching: bool) -> None:
    async with serving("a", "b") as serve:
        request = make_request("call", PROMPT[:3], max_tokens=40)  # shorter than a block
        async with streaming(serve.generation(request, is_caching=is_caching)) as chunks:
            for _ in range(20):
                await anext(chunks)
            await serve.leave(serve.taken_by("call")).die()
            async for _ in chunks:
                pass
        first, second = serve.ledger.routes.of_call("call")
        assert not first.query.block_hashes
        assert bool(second.query.block_hashes) == is_caching


async def test_a_replica_that_leaves_finishes_what_it_runs() -> None:
    async with serving("a", "b") as serve:
        answer = Answer()
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=40))) as chunks:
            answer.take(await anext(chunks))
            name = serve.taken_by("call")
            left = serve.leave(name)
            assert serve.ledger.view.replica_ids == tuple({"a", "b"} - {name})
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [expected_tokens(PROMPT, 40)]
        assert (answer.usage.replica_id, answer.usage.num_resumes) == (name, 0)
        await until(lambda: not left.feed._subscribers)
        assert set(serve.ledger._feeds) == set(serve.replicas)


async def test_a_replica_that_left_and_came_back_is_followed_anew() -> None:
    async with serving("a") as serve:
        answer = Answer()
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=40))) as chunks:
            answer.take(await anext(chunks))
            serve.join("a", serve.leave("a"))
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [expected_tokens(PROMPT, 40)]
        assert (await ask(serve, "next")).usage.replica_id == "a"
        assert len(serve.replicas["a"].feed._subscribers) == 1


async def test_a_loss_before_the_first_token() -> None:
    async with serving("a", "b") as serve:
        for made in serve.replicas.values():
            made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6, n=3))
        await until(lambda: any(made.executor.is_held for made in serve.replicas.values()))
        await _crash(serve, serve.taken_by("call"))
        for made in serve.replicas.values():
            made.executor.gate.set()
        answer = await running
        assert answer.tokens == [expected_tokens(PROMPT, 6, index) for index in range(3)]
        assert [placement.request.sampling_params.n for placement in serve.placements] == [3, 3]


async def test_a_beam_search_that_loses_its_replica_begins_again_elsewhere() -> None:
    """With blocks of four tokens, 3 beams of 12 tokens; the loss is after some of them."""
    async with serving("a", "b") as serve:
        asked = make_request("call", PROMPT, max_tokens=12, n=2, beam_width=3)
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=12, n=2, beam_width=3))
        await until(lambda: any(r.engine.stats().num_generated_tokens > 6 for r in serve.replicas.values()))
        await _crash(serve, serve.taken_by("call"))
        answer = await running
        assert answer.tokens == expected_beams(asked, FinishRule(frozenset(), 10**6))[:2]
        assert answer.usage.num_resumes == 1


async def test_a_beam_search_that_is_lost_with_half_of_its_answer_gives_the_other_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, take = list[TokenDelta](), leg.Leg.take

    def hear(self: leg.Leg, replica_id: str, delta: TokenDelta) -> None:
        heard.append(delta)
        if delta.index == 1 and len(heard) < 4:  # after the start, and the best beam
            self._finish()
        else:
            take(self, replica_id, delta)

    monkeypatch.setattr(leg.Leg, "take", hear)
    async with serving("a", "b") as serve:
        answer = await ask(serve, prompt_token_ids=PROMPT, max_tokens=12, n=2, beam_width=3)
    asked = make_request("call", PROMPT, max_tokens=12, n=2, beam_width=3)
    assert answer.tokens == expected_beams(asked, FinishRule(frozenset(), 10**6))
    assert (answer.usage.num_resumes, len(heard)) == (1, 6)


async def test_a_beam_search_comes_in_messages_that_a_client_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_cluster.serve.outputs.MAX_MERGED", 5)
    async with serving("a") as serve:
        answer, sizes = Answer(2), list[tuple[int, int]]()
        asked = make_request("call", PROMPT, max_tokens=12, n=2, beam_width=3)
        async with streaming(serve.generation(asked)) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
                sizes.append((chunk.index, len(chunk.token_ids)))
        latency = serve.latency.summary(time.monotonic())
        assert latency.ttft is not None
        assert (latency.ttft.num, latency.inter_token) == (1, None)  # they came together
    assert sizes == [(index, size) for index in range(2) for size in (5, 5, 2)]
    assert answer.tokens == expected_beams(asked, FinishRule(frozenset(), 10**6))
    assert answer.texts == [text_of(tokens) for tokens in answer.tokens]
    assert answer.reasons == ["length", "length"]


@pytest.mark.parametrize("merged", [5, 256])
async def test_a_scored_prompt_comes_in_messages_that_a_client_can_take(
    monkeypatch: pytest.MonkeyPatch, merged: int
) -> None:
    monkeypatch.setattr("shoal_cluster.serve.outputs.MAX_MERGED", merged)
    async with serving("a", "b") as serve:
        await ask(serve, "before", prompt_token_ids=PROMPT)
        answer, sizes = Answer(2), list[int]()
        asked = make_request("call", PROMPT, max_tokens=3, n=2, prompt_logprobs=2)
        async with streaming(serve.generation(asked)) as chunks:
            async for chunk in chunks:
                answer.take(chunk)
                sizes.append(len(chunk.prompt_logprobs))
        assert answer.usage.num_cached_tokens == 0
        (record,) = serve.ledger.routes.of_call("call")
        assert record.query.block_hashes == ()
        latency = serve.latency.summary(time.monotonic())
        assert latency.ttft is not None
        assert latency.ttft.num == 2
    assert answer.prompt_logprobs == expected_prompt_logprobs(PROMPT, 2)
    assert [size for size in sizes if size] == ([5, 5, 5, 5] if merged == 5 else [20])
    assert answer.tokens == [expected_tokens(PROMPT, 3, index) for index in range(2)]


@pytest.mark.parametrize("num_read", [0, 5])
async def test_a_scored_prompt_is_told_once_although_its_replica_is_lost(num_read: int) -> None:
    """Before its first token, and after some."""
    async with serving("a", "b") as serve:
        answer = Answer(2)
        asked = make_request("call", PROMPT, max_tokens=30, n=2, prompt_logprobs=1)
        if not num_read:
            for made in serve.replicas.values():
                made.executor.gate.clear()
        async with streaming(serve.generation(asked)) as chunks:
            reading = asyncio.create_task(anext(chunks))
            for _ in range(num_read):
                answer.take(await reading)
                reading = asyncio.create_task(anext(chunks))
            await until(lambda: bool(serve.placements))
            name = serve.taken_by("call")
            lost = serve.replicas[name]
            lost.executor.gate.clear()
            await until(lambda: lost.executor.is_held)
            await _crash(serve, name)
            for made in (lost, *serve.replicas.values()):
                made.executor.gate.set()
            answer.take(await reading)
            async for chunk in chunks:
                answer.take(chunk)
    assert answer.prompt_logprobs == expected_prompt_logprobs(PROMPT, 1)
    assert answer.tokens == [expected_tokens(PROMPT, 30, index) for index in range(2)]
    told = [placement.request.sampling_params.prompt_logprobs for placement in serve.placements]
    assert told == ([1, None, None] if num_read else [1, 1])


async def test_a_loss_on_the_way_by_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is too long for the feed and its call hangs: it goes elsewhere when the feed breaks."""
    monkeypatch.setattr(feed_client, "MAX_REQUEST_BYTES", 0)
    async with serving("a", "b") as serve:
        serve.may_call.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=6))
        await until(lambda: bool(serve.placements and serve.placements[0].wants))
        name = serve.placements[0].wants
        await _silent_crash(serve, name)
        await until(lambda: len(serve.placements) == 2)
        serve.may_call.set()
        answer = await running
        assert answer.tokens == [expected_tokens(PROMPT, 6)]
        assert answer.usage.replica_id != name


async def test_only_unfinished_sequences_go_on_elsewhere() -> None:
    async with serving("a", "b") as serve:
        tokens = [expected_tokens(PROMPT, 30, index) for index in range(2)]
        answer = Answer(2)
        async with streaming(serve.generation(stopping(f" {tokens[0][1]} ", max_tokens=30, n=2))) as chunks:
            while answer.reasons[0] is None or len(answer.tokens[1]) < 4:
                answer.take(await anext(chunks))
            await _crash(serve, serve.taken_by("call"))
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [tokens[0][:2], tokens[1]]
        assert [placement.request.index for placement in serve.placements] == [0, 1]


async def test_a_dead_engine_is_tried_once() -> None:
    """It looks idle, so it would be every request's first choice."""
    async with serving("a", "b") as serve:
        dead = serve.replicas["a"]
        dead.executor.failure = RuntimeError("fire")
        dead.run("last", "gateway")
        await until(lambda: dead.engine._failure)
        serve.replicas["b"].run("busy", "gateway", prompt_token_ids=range(60), max_tokens=60)
        answers = await asyncio.gather(*(ask(serve, f"call{i}", n=3) for i in range(4)))
        for i, answer in enumerate(answers):
            assert answer.tokens == [expected_tokens((1, 2, 3), 4, index) for index in range(3)]
            assert answer.usage.replica_id == "b"
            assert len([r for r in serve.ledger.routes.of_call(f"call{i}") if r.decision.ranked[0] == "a"]) <= 1


async def test_lost_four_times_is_unavailable() -> None:
    async with serving(*"abcde") as serve:
        for made in serve.replicas.values():
            made.executor.failure = RuntimeError("fire")
        generation = serve.generation(make_request("call"))
        with pytest.raises(Unavailable, match="resumed 3 times"):
            async with streaming(generation) as chunks:
                await anext(chunks)
        assert generation.num_resumes == 3
        kept = serve.ledger.routes.refusal_of("call")
        assert kept is not None
        assert "resumed 3 times" in kept.reason
        assert dict(kept.terms)["resumes"] == 3
        assert len({placement.query.excluded for placement in serve.placements}) == 4


async def test_every_sequence_has_its_own_three_resumes() -> None:
    async with serving(*"abcd") as serve:
        answer = Answer(6)
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=60, n=6))) as chunks:
            for _ in range(3):
                before = sum(map(len, answer.tokens))
                while sum(map(len, answer.tokens)) < before + 12:
                    answer.take(await anext(chunks))
                busiest = max(serve.replicas, key=lambda name: len(serve.replicas[name].calls))
                await _crash(serve, busiest)
            async for chunk in chunks:
                answer.take(chunk)
        assert answer.tokens == [expected_tokens(PROMPT, 60, index) for index in range(6)]
        assert answer.usage.num_resumes > 3
        assert {answer.usage.replica_id} == set(serve.replicas)


async def test_tokens_that_come_again_are_not_passed_on_again() -> None:
    async with serving("a") as serve:
        made, token_ids = serve.replicas["a"], tuple(expected_tokens(PROMPT, 1))
        first = TokenDelta(request_id="call", index=0, position=0, token_ids=token_ids, num_cached_tokens=0)
        made.executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: made.executor.is_held)
        for _ in range(2):
            serve.follower_of("call").take("a", first)
        made.executor.gate.set()
        assert (await running).tokens == [expected_tokens(PROMPT, 4)]


async def test_a_call_that_ends_without_its_tokens_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leg, "GRACE_S", 0.02)
    async with serving("a") as serve:
        serve.submits = False
        real = serve.replicas["a"].call

        async def hurried(request: Request, gateway_id: str, source: object) -> Outcome:
            if "#" not in request.request_id:
                return Outcome(refused=False)
            return await real(request, gateway_id)

        monkeypatch.setattr(serve.replicas["a"], "call", hurried)
        answer = await ask(serve, prompt_token_ids=PROMPT)
        assert answer.tokens == [expected_tokens(PROMPT, 4)]
        assert answer.usage.num_resumes == 1


@pytest.mark.parametrize("error", [ConnectionError("gone"), asyncio.CancelledError()], ids=repr)
async def test_a_call_that_fails_on_the_way_is_resumed(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    async with serving("a") as serve:
        real = FakePlacement._run

        async def failing(self: FakePlacement) -> Outcome:
            if len(serve.placements) == 1:
                self.sent.set_result(None)
                raise error
            return await real(self)

        monkeypatch.setattr(FakePlacement, "_run", failing)
        answer = await ask(serve)
        assert answer.tokens == [expected_tokens((1, 2, 3), 4)]


# Ends chosen by the client or the clock


async def test_a_deadline_ends_the_call_and_frees_its_blocks() -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        made.executor.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"after 0\.03 s"):
            async with streaming(serve.generation(make_request("call", PROMPT, n=2)), timeout_s=0.03) as chunks:
                await anext(chunks)
        await until(lambda: not made.calls)
        assert made.engine.stats().num_allocated_blocks == 0
        assert serve.placements[0].is_cancelled
        kept = serve.ledger.routes.refusal_of("call")
        assert kept is not None, "beside the record of where it was placed"
        assert dict(kept.terms)["output_tokens"] == 0


async def test_a_deadline_counts_from_the_arrival() -> None:
    """A call may have waited at the gateway while its long prompt was tokenised, or for a first replica."""
    async with serving("a") as serve:
        serve.replicas["a"].executor.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"after 60 s"):
            async with streaming(serve.generation(make_request(), waited_s=60.0), timeout_s=60.0) as chunks:
                await anext(chunks)


async def test_a_decision_that_is_taken_again_and_again_keeps_few_records() -> None:
    async with serving() as serve:
        query = serve.generation(make_request())._query
        serve.ledger.decide(query)
        (first,) = serve.ledger.routes.of_call(query.request_id)
        for _ in range(100):
            serve.ledger.decide(query)
        records = serve.ledger.routes.of_call(query.request_id)
        assert len(records) == MAX_RECORDS_PER_REQUEST
        assert records[0] is first


async def test_a_deadline_holds_while_nobody_can_take_the_call() -> None:
    async with serving() as serve:
        with pytest.raises(DeadlineExceeded):
            async with streaming(serve.generation(make_request()), timeout_s=0.03) as chunks:
                await anext(chunks)


async def test_nobody_to_take_the_call_is_unavailable() -> None:
    async with serving() as serve:
        with pytest.raises(Unavailable, match=r"no replica could take the request within 0\.03 s"):
            async with streaming(serve.generation(make_request(), placement_timeout_s=0.03)) as chunks:
                await anext(chunks)


async def test_a_replica_that_comes_late_takes_the_waiting_call() -> None:
    async with serving("a") as serve:
        made = serve.leave("a")
        running = asyncio.create_task(ask(serve))
        await until(lambda: serve.placements)
        assert not running.done()
        serve.join("a2", made)
        assert (await running).usage.replica_id == "a2"


@pytest.mark.parametrize("num_taken", [0, 1, 7])
async def test_closing_the_stream_cancels_the_call(num_taken: int) -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        tasks = asyncio.all_tasks()
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=100, n=3))) as chunks:
            for _ in range(num_taken):
                await anext(chunks)
        await until(lambda: serve.is_idle)
        assert made.engine.stats().num_generated_tokens < 300
        await until(lambda: asyncio.all_tasks() <= tasks)
        assert serve.ledger.routes.refusal_of("call") is None, (
            "it was placed, and nobody has given it up but its client"
        )


async def test_of_a_stream_that_is_closed_after_its_record_has_gone_nobody_says_that_it_was_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving("a") as serve:
        routes = serve.ledger.routes
        async with streaming(serve.generation(make_request("call", PROMPT, max_tokens=100))) as chunks:
            await anext(chunks)
            monkeypatch.setattr(routes, "_max_requests", 0)
            routes.trim()
            assert not routes.of_call("call")
        assert routes.refusal_of("call") is None


async def test_thirty_of_thirty_cancels_free_everything() -> None:
    async with serving("a", "b", num_blocks=40) as serve:
        for i in range(30):
            request = make_request(f"call{i}", range(i, i + 12), max_tokens=100, n=1 + i % 3)
            async with streaming(serve.generation(request)) as chunks:
                for _ in range(i % 4):
                    await anext(chunks)
        await until(lambda: serve.is_idle)


@pytest.mark.parametrize("where", ["placing", "running"])
async def test_cancelling_the_reader_cancels_the_call(where: str) -> None:
    async with serving("a") as serve:
        made = serve.replicas["a"]
        made.executor.gate.clear()
        if where == "placing":
            made = serve.leave("a")
        running = asyncio.create_task(ask(serve))
        await until(lambda: serve.placements and (where == "placing" or made.executor.is_held))
        running.cancel()
        await until(running.done)
        assert running.cancelled()
        await until(lambda: serve.is_idle)
        made.executor.gate.set()


async def test_an_id_in_use_is_refused_and_harms_nobody() -> None:
    async with serving("a") as serve:
        serve.replicas["a"].executor.gate.clear()
        running = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT))
        await until(lambda: serve.replicas["a"].executor.is_held)
        with pytest.raises(InvalidArgument, match="request_id") as caught:
            await ask(serve, prompt_token_ids=(9,))
        assert caught.value.field == "request_id"
        serve.replicas["a"].executor.gate.set()
        assert (await running).tokens == [expected_tokens(PROMPT, 4)]


async def test_a_bug_on_the_way_is_raised_and_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("a") as serve:

        def broken(request: object, query: object, deadline_s: float) -> FakePlacement:
            raise RuntimeError("a bug")

        monkeypatch.setattr(serve, "place", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            await ask(serve)


class TestLedger:
    """The gateway's ledger, where it affects the life of a call."""

    async def test_who_has_left_is_promised_nothing(self) -> None:
        async with serving("a") as serve:
            generation = serve.generation(make_request("call", PROMPT))
            assert serve.ledger.decide(generation._query).ranked == ("a",)
            assert serve.is_idle
            serve.ledger.routed(generation._query.request_id, "a")
            assert serve.is_idle

    async def test_a_replica_that_refuses_all_feeds_is_not_counted_on(self) -> None:
        async with serving("a", "b") as serve:
            assert serve.ledger.can_place(frozenset({"a"}))
            assert not serve.ledger.can_place(frozenset({"a", "b"}))
            await serve.replicas["b"].engine.drain(1.0)
            await until(lambda: not serve.ledger.can_place(frozenset({"a"})))

    async def test_a_closed_ledger_follows_nobody(self) -> None:
        tasks = asyncio.all_tasks()
        async with serving("a", "b") as serve:
            await serve.ledger.close()
            await until(lambda: not any(made.feed._subscribers for made in serve.replicas.values()))
        await until(lambda: asyncio.all_tasks() <= tasks)
