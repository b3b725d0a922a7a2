"""Requests held at the gateway, over real engines and feeds."""

from __future__ import annotations

import asyncio
import time

import pytest
from fixtures.fake_serve import FakeServe, ask, serving, streaming, turn_of
from fixtures.replicas import replica
from fixtures.waiting import until

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.baselines import ROUTINGS, Routing
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve.control_codec import route_record_from_proto, route_record_to_proto
from shoal_cluster.serve.dispatcher import Dispatcher
from shoal_cluster.serve.explanation_codec import explanation_from_bytes, explanation_to_bytes
from shoal_cluster.serve.generation import Generation
from shoal_replica.errors import ConfigError, DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.testing import expected_tokens, make_request


def note_pace(serve: FakeServe, token_s: float) -> None:
    """As if prompts at replica a had taken ``token_s`` seconds per token."""
    serve.replicas["a"].engine._pace._token_s = token_s


def close_gates(serve: FakeServe) -> None:
    for made in serve.replicas.values():
        made.executor.gate.clear()


def open_gates(serve: FakeServe) -> None:
    for made in serve.replicas.values():
        made.executor.gate.set()


def check_replay(dispatcher: Dispatcher, name: str, reason: str) -> None:
    """The record of ``name``'s refusal replays to the same answer, here and after a trip over the wire."""
    (refusal,) = dispatcher.explain(name).refusals
    assert refusal.record is not None
    assert reason in refusal.record.admission.reason
    assert refusal.record.replay() == refusal.record.admission
    (told,) = explanation_from_bytes(explanation_to_bytes(dispatcher.explain(name))).refusals
    assert told == refusal
    assert told.record is not None
    assert told.record.replay() == refusal.record.admission


async def drain(generation: Generation, timeout_s: float = 10.0) -> None:
    async with streaming(generation, timeout_s) as chunks:
        async for _ in chunks:
            pass


async def test_held_requests_all_get_their_answers_and_each_decision_replays() -> None:
    async with serving("a", "b", max_num_seqs=2) as serve:
        dispatcher = serve.hold()
        prompts = {f"call{i}": [*range(40), 500 + i] for i in range(12)}
        answers = await asyncio.gather(*(ask(serve, name, prompt_token_ids=p) for name, p in prompts.items()))
        for prompt, answer in zip(prompts.values(), answers, strict=True):
            assert answer.tokens == [expected_tokens(prompt, 4)]
        assert dispatcher.num_held == 0
        records = [record for name in prompts for record in serve.ledger.routes.of_call(name)]
        assert len(records) == 12
        assert all(record.replay() == record.decision for record in records)
        for record in records:
            look = serve.ledger.routes.look_of(record.query.request_id)
            assert look is not None
            assert look.replay() == (look.assignments, True)
            assert look.snapshot.replica_ids[look.assignments[-1][0]] == record.decision.best


@pytest.mark.parametrize("rule", ROUTINGS)
async def test_other_rules_place_at_once_and_their_decisions_replay_here_and_at_the_client(rule: Routing) -> None:
    async with serving("a", "b", max_num_seqs=4) as serve:
        dispatcher = serve.hold()
        serve.ledger.use_rule(rule)
        prompts = {f"call{i}": [*range(40 * (i % 3), 40 * (i % 3) + 40), 500 + i] for i in range(8)}
        for name, prompt in prompts.items():
            assert (await ask(serve, name, prompt_token_ids=prompt)).tokens == [expected_tokens(prompt, 4)]
        assert dispatcher.num_held == 0
        records = tuple(record for name in prompts for record in serve.ledger.routes.of_call(name))
        assert len(records) == len(prompts)
        assert all(record.replay() == record.decision for record in records)
        sent = tuple(route_record_from_proto(route_record_to_proto(record)) for record in records)
        assert sent == records
        assert all(record.replay() == record.decision for record in sent)
        if rule == "round_robin":
            assert [record.decision.ranked[0] for record in records] == ["a", "b"] * 4


async def test_an_unknown_rule_is_named() -> None:
    async with serving() as serve:
        with pytest.raises(ConfigError, match=r"routing\.rule: got 'random'; must be one of"):
            serve.ledger.use_rule("random")


async def test_a_replica_gets_only_what_it_can_start() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        calls = [asyncio.create_task(ask(serve, f"call{i}", prompt_token_ids=range(30 + i))) for i in range(4)]
        await until(lambda: dispatcher.num_held == 3 and serve.replicas["a"].executor.is_held)
        stats = serve.replicas["a"].engine.stats()
        assert stats.num_running + stats.num_waiting == 1
        assert dispatcher.num_held_tokens == 3 + 4 + 5, "the 28 that the first computes are not counted"
        open_gates(serve)
        await asyncio.gather(*calls)


async def test_requests_wait_for_a_first_replica_and_not_for_ever() -> None:
    async with serving() as serve:
        dispatcher = serve.hold(patience_s=0.05)
        with pytest.raises(Unavailable, match="no replica became ready in time"):
            await ask(serve, "too-early")
        (refusal,) = dispatcher.explain("too-early").refusals
        assert refusal.text.startswith("too-early: given up: no replica became ready in time (prompt_tokens ")
        dispatcher = serve.hold()
        async with serving("late") as other:
            waiting = asyncio.create_task(ask(serve, "patient", prompt_token_ids=range(9)))
            await until(lambda: dispatcher.num_held == 1)
            serve.join("late", other.replicas["late"])
            assert (await waiting).tokens == [expected_tokens(range(9), 4)]
            serve.leave("late")


async def test_a_replica_that_is_away_for_a_moment_costs_nobody_the_place_in_the_queue() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold(patience_s=0.5)
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(25)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        held = asyncio.create_task(ask(serve, "held", prompt_token_ids=range(100, 109)))
        await until(lambda: dispatcher.num_held == 1)
        loop, stats = asyncio.get_running_loop(), serve.replicas["a"].engine.stats()
        ends_s = loop.time() + 1.5
        while loop.time() < ends_s:
            serve.ledger.view.disconnect("a")
            await asyncio.sleep(0.02)
            serve.ledger.view.apply_snapshot("a", stats, (), time.monotonic())
            await asyncio.sleep(0.06)  # so no two looks in a row, 0.125 s apart, find it away
        assert not held.done()
        serve.ledger.view.disconnect("a")
        with pytest.raises(Unavailable, match="no replica became ready in time"):
            await held
        serve.ledger.view.apply_snapshot("a", stats, (), time.monotonic())
        open_gates(serve)
        await running


@pytest.mark.parametrize("limits", [{"max_waiting_requests": 2}, {"max_waiting_tokens": 20}])
async def test_no_more_waits_for_a_first_replica_than_its_queue_may_hold(limits: dict[str, int]) -> None:
    async with serving() as serve:
        dispatcher = serve.hold(AdmissionLimits(**limits))
        asked = [asyncio.create_task(ask(serve, f"early{i}", prompt_token_ids=range(9))) for i in range(2)]
        await until(lambda: dispatcher.num_held == 2)
        with pytest.raises(ResourceExhausted, match="no replica can take requests now, and 2 wait already") as refused:
            await ask(serve, "late", prompt_token_ids=range(9))
        assert refused.value.retry_after_s
        check_replay(dispatcher, "late", "2 wait already")
        async with serving("first") as other:
            serve.join("first", other.replicas["first"])
            assert [answer.tokens for answer in await asyncio.gather(*asked)] == [[expected_tokens(range(9), 4)]] * 2
            serve.leave("first")


async def test_what_no_replica_can_hold_is_refused_when_the_first_one_comes() -> None:
    """Before that, nobody knows what a replica can hold."""
    async with serving() as serve:
        dispatcher = serve.hold()
        giant = asyncio.create_task(ask(serve, "giant", prompt_token_ids=range(900)))
        fine = asyncio.create_task(ask(serve, "fine", prompt_token_ids=range(9)))
        await until(lambda: dispatcher.num_held == 2)
        async with serving("late") as other:
            serve.join("late", other.replicas["late"])
            with pytest.raises(InvalidArgument, match=r"900 tokens.*needs 226 blocks and the largest replica has 64"):
                await giant
            check_replay(dispatcher, "giant", "the largest replica has 64")
            assert (await fine).tokens == [expected_tokens(range(9), 4)]
            serve.leave("late")


async def test_what_only_a_replica_that_has_left_could_hold_is_told_so_and_a_stream_waits_for_another() -> None:
    async with serving("a", num_blocks=256, max_num_seqs=1) as serve, serving("small") as other:
        dispatcher = serve.hold(patience_s=1.0)
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(25)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        giant = asyncio.create_task(ask(serve, "giant", prompt_token_ids=range(900)))
        await until(lambda: dispatcher.num_held == 1)
        serve.join("small", other.replicas["small"])
        query = RouteQuery.for_request(make_request("stream", range(900)), 4, is_caching=True)
        stream = PendingRequest(query=query, arrival_s=time.monotonic(), priority=RESUMED_PRIORITY)
        going_on = asyncio.create_task(turn_of(dispatcher, stream))
        await until(lambda: dispatcher.num_held == 2)
        left = serve.leave("a")
        left.executor.gate.set()
        with pytest.raises(InvalidArgument, match="needs 226 blocks and the largest replica has 64"):
            await giant
        with pytest.raises(Unavailable, match="no replica became ready in time"):
            await going_on
        check_replay(dispatcher, "giant", "the largest replica has 64")
        await running
        assert dispatcher.num_held == 0
        serve.leave("small")


async def test_what_waits_for_a_replica_that_starts_waits_to_its_own_deadline() -> None:
    async with serving() as serve:
        serve.is_growing = True
        dispatcher = serve.hold(patience_s=0.01)
        with pytest.raises(DeadlineExceeded):
            await drain(serve.generation(make_request("hopeless")), timeout_s=0.2)
        waiting = asyncio.create_task(ask(serve, "patient", prompt_token_ids=range(9)))
        await until(lambda: dispatcher.num_held == 1)
        serve.is_growing = False
        with pytest.raises(Unavailable, match="no replica became ready in time"):
            await waiting


async def test_what_waits_for_replicas_that_fail_to_start_is_told_so_and_a_later_start_serves() -> None:
    async with serving() as serve, replica() as late:
        serve.is_growing = True
        dispatcher = serve.hold()
        waiting = [asyncio.create_task(ask(serve, f"call{i}", prompt_token_ids=range(9 + i))) for i in range(2)]
        await until(lambda: dispatcher.num_held == 2)
        serve.start_failure = "num_blocks: too many"
        for task in waiting:
            with pytest.raises(Unavailable, match="no replica could be started: num_blocks: too many"):
                await task
        with pytest.raises(Unavailable, match="no replica could be started"):
            await ask(serve, "next")
        assert dispatcher.num_held == 0
        for name in ("call0", "call1", "next"):
            (refusal,) = dispatcher.explain(name).refusals
            assert (refusal.reason, refusal.retry_after_s) == ("no replica could be started: num_blocks: too many", 0.0)
        serve.join("late", late)
        await until(lambda: serve.ledger.can_place(frozenset()))
        assert (await ask(serve, "served", prompt_token_ids=range(9))).tokens == [expected_tokens(range(9), 4)]
        serve.leave("late")


async def test_a_second_call_of_an_id_leaves_nothing_for_the_first_ones_end_to_hide_behind() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        first = asyncio.create_task(ask(serve, "first"))
        await until(lambda: serve.replicas["a"].executor.is_held)
        request = make_request("late", range(50))
        late = asyncio.create_task(drain(serve.generation(request), timeout_s=0.5))
        await until(lambda: dispatcher.num_held == 1)
        with pytest.raises(InvalidArgument, match="must not be that of a running request"):
            await drain(serve.generation(request), timeout_s=0.5)
        assert dispatcher.explain("late").refusals == ()
        with pytest.raises(DeadlineExceeded):
            await late
        (refusal,) = dispatcher.explain("late").refusals
        assert refusal.reason == "the request was not finished after 0.5 s"
        open_gates(serve)
        await first


async def test_a_deadline_ends_the_wait_and_leaves_nothing() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        first = asyncio.create_task(ask(serve, "first"))
        await until(lambda: serve.replicas["a"].executor.is_held)
        with pytest.raises(DeadlineExceeded):
            await drain(serve.generation(make_request("late", range(50))), timeout_s=0.05)
        await until(lambda: dispatcher.num_held == 0)
        (refusal,) = dispatcher.explain("late").refusals
        assert refusal.text.startswith("late: given up: the request was not finished after 0.05 s (age_s 0.")
        leaves = asyncio.create_task(ask(serve, "leaves", prompt_token_ids=range(50)))
        await until(lambda: dispatcher.explain("leaves"))
        leaves.cancel()
        await until(lambda: dispatcher.num_held == 0)
        (refusal,) = dispatcher.explain("leaves").refusals
        assert "its client has left" in refusal.reason
        open_gates(serve)
        await first


async def test_sheds_with_a_date_when_queues_are_full() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold(AdmissionLimits(max_waiting_tokens=50))
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(20)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        held = asyncio.create_task(ask(serve, "held", prompt_token_ids=range(100, 145)))
        await until(lambda: dispatcher.num_held == 1)
        with pytest.raises(ResourceExhausted, match="queue is full") as refused:
            await ask(serve, "shed", prompt_token_ids=range(200, 250))
        assert refused.value.retry_after_s is not None
        assert dispatcher.num_held == 1
        open_gates(serve)
        await asyncio.gather(running, held)


async def test_what_is_late_behind_others_alone_is_not_refused() -> None:
    """The others may go after it, so it is held until it is certain to be late."""
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold(AdmissionLimits(objective=LatencyObjective(ttft_s=1.0, prefill_factor=2.0)))
        note_pace(serve, token_s=0.1)
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(25)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        await until(lambda: serve.ledger.view.candidates((), 0.0).told["token_s"][0] > 0)
        held = [asyncio.create_task(ask(serve, "long", prompt_token_ids=range(100, 150)))]
        await until(lambda: dispatcher.num_held == 1)
        late = asyncio.create_task(ask(serve, "late", prompt_token_ids=range(300, 309)))
        await until(lambda: dispatcher.num_held == 2)
        assert dispatcher.explain("late").held
        open_gates(serve)
        await asyncio.gather(running, late, *held)


async def test_refuses_what_cannot_begin_before_its_deadline() -> None:
    """At once, or after it has waited too long; not before a pace is known; whatever its objective."""
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(25)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        unknown = asyncio.create_task(drain(serve.generation(make_request("unknown", range(100, 109)))))
        await until(lambda: dispatcher.num_held == 1)
        note_pace(serve, token_s=0.1)
        await until(lambda: serve.ledger.view.candidates((), 0.0).told["token_s"][0] > 0)
        told = r"takes 0\.9 s where it takes least, and its deadline is 0\.[78]\d* s"
        with pytest.raises(DeadlineExceeded, match=told):
            await drain(serve.generation(make_request("at-once", range(200, 209))), timeout_s=0.8)
        check_replay(dispatcher, "at-once", "its deadline is 0.")  # less the moments that have passed
        note_pace(serve, token_s=0.01)  # its prompt takes 0.5 s: it is refused 0.5 s before its deadline
        await until(lambda: serve.ledger.view.candidates((), 0.0).told["token_s"][0] < 0.05)
        with pytest.raises(ResourceExhausted, match="and its deadline is lost"):
            await drain(serve.generation(make_request("held", range(300, 350))), timeout_s=1.0)
        check_replay(dispatcher, "held", "its deadline is lost")
        open_gates(serve)
        await asyncio.gather(running, unknown)


async def test_sheds_what_was_held_until_its_objective_was_lost() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold(AdmissionLimits(objective=LatencyObjective(ttft_s=0.3, prefill_factor=2.0)))
        note_pace(serve, token_s=1e-4)
        close_gates(serve)
        running = asyncio.create_task(ask(serve, "running", prompt_token_ids=range(5)))
        await until(lambda: serve.replicas["a"].executor.is_held)
        await until(lambda: serve.ledger.view.candidates((), 0.0).told["token_s"][0] > 0)
        with pytest.raises(ResourceExhausted, match="its objective is lost") as refused:
            await ask(serve, "held", prompt_token_ids=range(100, 120))
        assert refused.value.retry_after_s is not None
        check_replay(dispatcher, "held", "its objective is lost")
        assert dispatcher.num_held == 0
        open_gates(serve)
        await running


async def test_a_light_tenant_does_not_wait_behind_a_heavy_one() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        order: list[str] = []

        async def call(tenant: str, number: int, start: int) -> None:
            request = make_request(f"{tenant}{number}", range(start, start + 100), max_tokens=1, tenant=tenant)
            await drain(serve.generation(request))
            order.append(tenant)

        heavy = [asyncio.create_task(call("heavy", i, 1000 * i)) for i in range(100)]
        await until(lambda: dispatcher.num_held == 99)
        light = asyncio.create_task(call("light", 0, 99_000))
        await until(lambda: dispatcher.num_held == 100)
        open_gates(serve)
        await asyncio.gather(*heavy, light)
        assert order.index("light") <= 2 + 2048 / 50, (
            "the heavy one gets a burst and the other's half, not its whole queue"
        )


async def test_what_is_held_and_what_was_refused_is_explained() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        async with asyncio.TaskGroup() as group:
            for name in ("runs", "next", "last"):
                group.create_task(ask(serve, name, prompt_token_ids=[*range(40)]))
                await until(lambda name=name: dispatcher.explain(name))
            await until(lambda: dispatcher.num_held == 2)
            (held,) = dispatcher.explain("last").held
            assert [place.request_id for place in held.queue] == ["next", "last"]
            assert held.queue[0].replica_id == "a"
            assert (held.number, held.num_held) == (2, 2)
            assert held.waited_s > 0
            assert "number 2 of 2, waits for" in held.text
            assert "before it: next (for a)" in held.text

            dispatcher.desk.limits = AdmissionLimits(max_waiting_tokens=1)
            with pytest.raises(ResourceExhausted) as caught:
                await ask(serve, "late", prompt_token_ids=[*range(30)])
            (refusal,) = dispatcher.explain("late").refusals
            assert refusal.reason in str(caught.value)
            assert refusal.retry_after_s == caught.value.retry_after_s
            assert dict(refusal.terms)["prompt_tokens"] == 30
            assert dict(refusal.terms)["replicas"] == 1
            assert dict(refusal.terms)["held_requests"] >= 2
            assert refusal.text.startswith("late: refused, to be tried again after ")
            with pytest.raises(InvalidArgument, match="prompt") as wrong:
                await ask(serve, "huge", prompt_token_ids=[*range(10_000)])
            (impossible,) = dispatcher.explain("huge").refusals
            assert impossible.reason == str(wrong.value)
            check_replay(dispatcher, "late", "every replica's queue is full")
            check_replay(dispatcher, "huge", "the largest replica has 64")
            told = dispatcher.explain("last")
            assert explanation_from_bytes(explanation_to_bytes(told)) == told
            assert explanation_from_bytes(explanation_to_bytes(dispatcher.explain("late"))).refusals == (refusal,)
            open_gates(serve)
        told = dispatcher.explain("last")
        assert not told.held
        assert told.looks[0].queue[-1].replica_id == told.records[0].decision.best == "a"
        assert told.looks[0].text.startswith("last: sent to a, due in ")
        assert explanation_from_bytes(explanation_to_bytes(told)).looks == told.looks
        assert not dispatcher.explain("nobody")


async def test_prompts_of_one_request_are_explained_together() -> None:
    async with serving("a", max_num_seqs=1) as serve:
        dispatcher = serve.hold()
        close_gates(serve)
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(ask(serve, f"list-{number}", prompt_token_ids=[*range(40)]))
            await until(lambda: dispatcher.num_held == 2)
            assert [held.request_id for held in dispatcher.explain("list").held] == ["list-1", "list-2"]
            open_gates(serve)
        assert len(dispatcher.explain("list").records) == 3
