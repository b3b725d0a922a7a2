"""Prefill and decode replicas: who is which, where a request goes first, and how it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from fixtures.cluster_views import make_query, make_stats
from fixtures.fake_serve import FakeServe, ask, serving, streaming
from fixtures.waiting import DEADLINE_S, until
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.policies import native_library, plan
from shoal_cluster.policies.columns import ROOM
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.phases import SHORT_S, Kind, PhaseRule
from shoal_cluster.policies.roles import Roles, num_prefills
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import decide
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.serve.journal import EventKind
from shoal_replica.guest_table import GuestTable
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.request import FinishReason, TokenDelta
from shoal_replica.testing import expected_tokens, make_request

PROMPT = tuple(range(100, 141))
HASHES = tuple(hash_blocks(PROMPT, 4))
NUM_TOKENS = 20


@given(count=st.integers(0, 200), share=st.floats(0, 0.999))
def test_some_of_each_or_none(count: int, share: float) -> None:
    prefills = num_prefills(count, share)
    if not share or count < 2:
        assert prefills == 0
    else:
        assert 1 <= prefills <= count - 1
        assert abs(prefills - share * count) <= 1


def view_of(*names: str, **stats: object) -> ClusterView:
    view = ClusterView()
    for name in names:
        view.join(name)
        view.apply_snapshot(name, make_stats(**stats), (), 0.0)
    return view


def roles_in(view: ClusterView) -> dict[str, str]:
    return {row.replica_id: row.role for row in view.replicas_for((), 0.0)}


def test_roles_follow_the_replicas_that_take_requests() -> None:
    view = view_of("a", "b", "c", "d")
    roles = Roles(view)
    roles.look(0.0)
    assert not view.has_roles
    roles.share = 0.25
    roles.look(0.0)
    assert roles_in(view) == {"a": "prefill", "b": "decode", "c": "decode", "d": "decode"}
    view.disconnect("a")
    roles.look(0.1)
    assert roles_in(view) == {"a": "", "b": "prefill", "c": "decode", "d": "decode"}
    view.leave("a")
    view.leave("c")
    view.leave("d")
    roles.look(0.2)
    assert not view.has_roles  # one replica has to do everything
    view.join("c")
    view.apply_snapshot("c", make_stats(), (), 0.3)
    roles.look(0.3)
    assert roles_in(view) == {"b": "prefill", "c": "decode"}
    roles.share = 0.0
    roles.look(0.4)
    assert not view.has_roles
    view.check_invariants()


def test_a_request_goes_to_replicas_for_its_phase_and_the_record_replays() -> None:
    view = view_of("a", "b", "c")
    view.set_roles({"a": "prefill", "b": "decode", "c": "decode"})
    view.apply_update("a", make_stats(num_running=7, num_waiting_tokens=5000), (), (), 0.0)
    for phase, able in (("prefill", {"a"}), ("decode", {"b", "c"}), ("", {"a", "b", "c"})):
        query = make_query(phase=phase)
        record = decide(query, view.candidates((), 0.0), RouteWeights(), seed=1, time_s=0.0)
        assert set(record.decision.ranked) == able
        assert record.replay() == record.decision
    told = {c.replica_id: c.rejected for c in record.decision.candidates}
    assert told == {"a": "", "b": "", "c": ""}
    record = decide(make_query(phase="decode"), view.candidates((), 0.0), RouteWeights(), seed=1, time_s=0.0)
    assert [c.rejected for c in record.decision.candidates] == ["for prefill alone", "", ""]


@pytest.mark.parametrize("is_native", [True, False])
def test_held_requests_wait_for_a_replica_of_their_phase(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(plan, "library", None)
    assert native_library.library is not None
    view = view_of("a", "b")
    view.set_roles({"a": "prefill", "b": "decode"})
    view.apply_update("a", make_stats(num_waiting_tokens=5000), (), (), 0.0)
    queue = PendingQueue(HoldConfig())
    for phase in ("prefill", "decode"):
        queue.push(PendingRequest(query=make_query(request_id=phase, phase=phase), arrival_s=0.0))
    sent = queue.next(view, RouteWeights(), 0.0, Random(0))
    assert sent is not None
    assert (sent.pending.query.request_id, sent.decision.best) == ("decode", "b")
    assert queue.next(view, RouteWeights(), 0.0, Random(0)) is None
    view.set_roles({"a": "decode", "b": "prefill"})  # while it waits
    sent = queue.next(view, RouteWeights(), 0.1, Random(0))
    assert sent is not None
    assert (sent.pending.query.request_id, sent.decision.best) == ("prefill", "b")


def rule(view: ClusterView, ttft_s: float = 2.0, num_gateways: int = 1) -> Callable[..., str]:
    """What a rule says of queries by ``view``."""
    made = PhaseRule(None, ttft_s, num_gateways)

    def phase(query: RouteQuery, kind: Kind = "new") -> str:
        return made.place(query, kind, view.candidates(query.block_hashes, 0.0)).phase

    return phase


def test_a_prompt_of_which_little_is_left_is_computed_where_it_decodes() -> None:
    view = view_of("a", "b", num_total_blocks=1000, token_s=0.001, step_s=0.01)
    view.set_roles({"a": "prefill", "b": "decode"})
    phase, few = rule(view), round(SHORT_S / 0.001)
    assert phase(make_query(few)) == "decode"
    assert phase(make_query(few + 1)) == "prefill"
    hashes = tuple(hash_blocks(range(160), 16))
    query = replace(make_query(160 + few), block_hashes=hashes)
    assert phase(query) == "prefill"
    view.apply_update("a", None, hashes, (), 0.0)  # that is no help
    assert phase(query) == "prefill"
    view.apply_update("b", None, hashes, (), 0.0)
    assert phase(query) == "decode"
    longer = replace(query, num_prompt_tokens=query.num_prompt_tokens + 1)
    assert phase(longer) == "prefill"
    view.apply_update("b", make_stats(num_total_blocks=1000, token_s=0.001, step_s=0.05), (), (), 0.0)
    assert phase(longer) == "decode"  # decode steps take longer
    view.apply_update("b", make_stats(num_total_blocks=1000), (), (), 0.0)
    assert phase(query) == "decode"  # as slow as the other
    view.apply_update("a", make_stats(num_total_blocks=1000), (), (), 0.0)
    assert phase(query) == "prefill"  # no pace is known


def test_what_has_begun_or_stays_whole_is_decoded_and_what_has_one_token_is_not() -> None:
    view = view_of("a", "b", num_total_blocks=1000, token_s=0.001)
    view.set_roles({"a": "prefill", "b": "decode"})
    phase, query = rule(view), make_query(1000)
    kinds: tuple[Kind, ...] = ("new", "begun", "whole", "one token")
    assert [phase(query, kind) for kind in kinds] == ["prefill", "decode", "decode", "prefill"]
    assert phase(replace(query, excluded=frozenset("x"))) == ""
    view.apply_update("b", make_stats(num_total_blocks=1000, num_free_blocks=125), (), (), 0.0)
    assert [phase(query, kind) for kind in kinds] == ["", "", "", "prefill"]  # there is no room to decode


def test_others_help_when_prompts_would_wait_longer_than_the_objective_allows() -> None:
    view = view_of("a", "b", "c", num_total_blocks=1000, token_s=0.001)
    view.set_roles({"a": "prefill", "b": "prefill", "c": "decode"})
    phase, query = rule(view), make_query(1000)
    view.apply_update("a", make_stats(num_total_blocks=1000, token_s=0.001, num_waiting_tokens=4000), (), (), 0.0)
    assert phase(query) == "prefill"
    view.reserve("other", "b", 1, 1)
    assert phase(query) == ""
    view.reserve("other", "c", 1, 1)
    assert phase(query) == "prefill"
    queue = PendingQueue(HoldConfig())
    queue.push(PendingRequest(query=make_query(request_id="held"), arrival_s=0.0))  # 160 tokens
    for num_gateways in (1, 4):
        made = PhaseRule(queue, 2.0, num_gateways)
        for tokens, expected in ((4000 - 160 * num_gateways, "prefill"), (4001 - 160 * num_gateways, "")):
            stats = make_stats(num_total_blocks=1000, token_s=0.001, num_waiting_tokens=tokens)
            view.apply_update("a", stats, (), (), 0.0)
            assert made.place(query, "new", view.candidates((), 0.0)).phase == expected


def test_a_request_stays_where_its_prompt_is_computed_unless_another_has_room_for_all_that_come() -> None:
    view = view_of("a", "b", num_total_blocks=80)  # ten of them stay free when blocks come
    view.set_roles({"a": "prefill", "b": "decode"})
    query, made = make_query(16 * 19), PhaseRule(None, 2.0)  # 20 blocks

    def is_part(replica_id: str = "a") -> bool:
        return made.is_part(query, replica_id, view.candidates(query.block_hashes, 0.0))

    assert is_part()
    assert not is_part("b")
    for name in ("one", "two"):
        made.expect(replace(query, request_id=name))
    assert is_part()
    made.expect(replace(query, request_id="three"))
    assert not is_part()  # 70 - 60 blocks are left
    made.forget("three")
    made.forget("three")
    assert is_part()
    made.expect(query)
    assert is_part()  # it is not counted twice
    assert len(made) == 2
    view.apply_update("b", make_stats(num_total_blocks=80, num_free_blocks=69), (), (), 0.0)
    assert not is_part()
    made.forget("one")
    made.forget("two")
    view.apply_update("b", make_stats(num_total_blocks=80, num_free_blocks=29), (), (), 0.0)
    assert not is_part()
    query = replace(query, block_hashes=tuple(hash_blocks(range(16 * 19), 16)))
    view.apply_update("b", make_stats(num_total_blocks=80, max_num_seqs=1), query.block_hashes[:1], (), 0.0)
    assert is_part()
    made.expect(replace(query, request_id="one"))
    assert not is_part()  # its only slot will be taken


@pytest.mark.parametrize("state", ["draining", "not connected", "stalled"])
def test_room_of_replicas_that_take_nothing_is_no_room(state: str) -> None:
    view = view_of("a", "b", "c", num_total_blocks=80)
    view.set_roles({"a": "prefill", "b": "decode"})
    view.apply_update("b", make_stats(num_total_blocks=80, num_free_blocks=40), (), (), 0.0)
    if state == "draining":
        view.apply_update("c", make_stats(num_total_blocks=80, draining=True), (), (), 0.0)
    elif state == "stalled":
        view.set_stalled("c", True)
    else:
        view.disconnect("c")
    made, query = PhaseRule(None, 2.0), make_query(16 * 9)
    assert made.is_part(query, "a", view.candidates((), 0.0))
    for name in ("one", "two", "three"):
        made.expect(replace(query, request_id=name))
    assert not made.is_part(query, "a", view.candidates((), 0.0))


def queue_of(*phases: str) -> PendingQueue:
    queue = PendingQueue(HoldConfig(objective=LatencyObjective(ttft_s=2.0)))
    for number, phase in enumerate(phases):
        query = make_query(request_id=str(number), phase=phase)
        queue.push(PendingRequest(query=query, arrival_s=0.001 * number))
    return queue


def test_who_waits_for_long_goes_anywhere() -> None:
    view = view_of("a", "b")
    view.set_roles({"a": "prefill", "b": "decode"})
    view.apply_update("a", make_stats(num_waiting_tokens=5000), (), (), 0.0)
    queue = queue_of("prefill", "prefill")
    for now in (1.0, 1.2, 1.4):
        assert queue.next(view, RouteWeights(), now, Random(0)) is None
    sent = queue.next(view, RouteWeights(), 1.6, Random(0))
    assert sent is not None
    assert (sent.decision.best, sent.pending.query.phase) == ("b", "")
    assert sent.look is not None
    assert sent.look.replay() == (sent.look.assignments, True)


def test_those_of_one_phase_do_not_hide_those_of_the_other() -> None:
    view = view_of("a", "b")
    view.set_roles({"a": "prefill", "b": "decode"})
    view.apply_update("a", make_stats(num_waiting_tokens=5000), (), (), 0.0)
    queue = queue_of(*["prefill"] * 100, "decode")
    sent = queue.next(view, RouteWeights(), 0.2, Random(0))
    assert sent is not None
    assert (sent.pending.query.phase, sent.decision.best) == ("decode", "b")
    assert queue.num_blocks_to_decode == 0


async def with_roles(serve: FakeServe, share: float = 0.5) -> dict[str, str]:
    serve.hold()
    serve.ledger.phases.roles.share = share
    await until(lambda: serve.ledger.view.has_roles)
    return {role: replica_id for replica_id, role in roles_in(serve.ledger.view).items()}


async def test_one_computes_the_prompt_and_another_goes_on_with_its_blocks() -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        answer = await ask(serve, prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS)
        assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
        assert answer.reasons == ["length"]
        assert answer.usage is not None
        assert (answer.usage.replica_id, answer.usage.num_resumes) == (who["decode"], 0)
        first, then = (serve.replicas[who[role]].engine.stats() for role in ("prefill", "decode"))
        assert (first.num_prompt_tokens, first.num_generated_tokens, first.num_finished) == (len(PROMPT), 1, 0)
        assert (then.num_prompt_tokens, then.num_generated_tokens, then.num_finished) == (
            1,
            NUM_TOKENS - 1,
            1,
        )  # its tail is no whole block
        assert then.num_blocks_taken == first.num_blocks_given == len(HASHES)
        assert [leg.end for leg in serve.times[0].legs] == ["prefilled", ""]
        assert not [event for event in serve.ledger.journal.last(9) if event.kind is EventKind.RESUMED]
        for record in serve.ledger.routes.of_call("call"):
            assert record.replay() == record.decision
        quality = serve.ledger.view_tally.quality()
        assert quality.num_cached_tokens == quality.num_predicted_tokens


async def test_where_there_is_no_room_to_go_on_it_stays() -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        table = GuestTable(serve.replicas[who["decode"]].engine.blocks._kv, tuple(hash_blocks(range(160), 4)))
        table.make_room()  # 40 of 64 blocks
        serve.replicas[who["decode"]].engine._reports.note_change()
        await until(lambda: serve.ledger.view.present(0.0).columns[ROOM].min() < 30)
        prompt = tuple(range(100, 200))  # 25 blocks
        answer = await ask(serve, prompt_token_ids=prompt, max_tokens=NUM_TOKENS)
        table.close()
        assert answer.usage is not None
        assert answer.usage.replica_id == who["prefill"]
        assert len(serve.times[0].legs) == 1


async def test_each_of_several_sequences_goes_on() -> None:
    async with serving("a", "b", "c") as serve:
        await with_roles(serve, 0.3)
        answer = await ask(serve, prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS, n=3)
        assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS, index) for index in range(3)]
        assert [leg.end for leg in serve.times[0].legs] == ["prefilled", "", "", ""]
        assert sum(made.engine.stats().num_finished for made in serve.replicas.values()) == 1


@pytest.mark.parametrize(
    ("asked", "role"),
    [
        ({"max_tokens": 1}, "prefill"),
        ({"max_tokens": 8, "beam_width": 2}, "decode"),
        ({"max_tokens": 8, "prompt_logprobs": 0}, "decode"),
    ],
)
async def test_what_cannot_be_shared_out_stays_in_one_place(asked: dict[str, int], role: str) -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        answer = await ask(serve, prompt_token_ids=PROMPT, **asked)
        assert answer.usage is not None
        assert answer.usage.replica_id == who[role]
        assert len(serve.times[0].legs) == 1


async def test_an_answer_that_ends_with_its_first_token_goes_nowhere_else() -> None:
    (first,) = expected_tokens(PROMPT, 1)
    async with serving("a", "b") as serve:
        await with_roles(serve)
        for name, ends in (("token", {"stop_token_ids": (first,)}), ("text", {"stop": (f"{first} ",)})):
            request = make_request(name, PROMPT, max_tokens=NUM_TOKENS)
            request = replace(request, sampling_params=replace(request.sampling_params, **ends))
            async with streaming(serve.generation(request)) as chunks:
                reasons = [chunk.finish_reason async for chunk in chunks]
            assert reasons == ["stop"]
        assert [[leg.end for leg in times.legs] for times in serve.times] == [[""], [""]]


@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_when_a_replica_dies_the_other_does_all(dies: str) -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        for made in serve.replicas.values():
            made.executor.pause_s = 0.01
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS))
        await until(lambda: serve.replicas[who[dies]].engine.stats().num_steps > 0)
        lost = serve.leave(who[dies])
        await lost.feed.stop()
        answer = await call
        assert answer.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
        again = await ask(serve, "again", prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS)
        assert again.tokens == [expected_tokens(PROMPT, NUM_TOKENS)]
        assert len(serve.times[-1].legs) == 1
        await lost.engine.drain(DEADLINE_S)


async def test_a_client_that_leaves_between_two_replicas_leaves_nothing_behind() -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        serve.may_call.clear()  # Serve's calls are late
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS))
        await until(lambda: serve.replicas[who["decode"]].engine.stats().num_generated_tokens > 0)
        call.cancel()
        await asyncio.wait([call])
        serve.may_call.set()


async def test_many_at_once() -> None:
    async with serving("a", "b", "c", num_blocks=400) as serve:
        await with_roles(serve, 0.3)
        prompts = [tuple(range(number, number + number - 70)) for number in range(100, 112)]
        answers = await asyncio.gather(
            *(ask(serve, f"call-{p[0]}", prompt_token_ids=p, max_tokens=NUM_TOKENS) for p in prompts)
        )
        assert [answer.tokens for answer in answers] == [[expected_tokens(p, NUM_TOKENS)] for p in prompts]


async def test_a_client_that_leaves_at_the_very_moment_of_a_handover_stops_it() -> None:
    """The prompt's only token comes when the leg has been cancelled and has not yet heard of it."""
    (token_id,) = expected_tokens(PROMPT, 1)
    delta = TokenDelta(
        request_id="call",
        index=0,
        position=0,
        token_ids=(token_id,),
        num_cached_tokens=0,
        finish_reason=FinishReason.PREFILLED,
    )
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        made = serve.replicas[who["prefill"]]
        made.executor.gate.clear()
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=NUM_TOKENS))
        await until(lambda: made.executor.is_held)
        follower = serve.follower_of("call")
        call.cancel()
        asyncio.get_running_loop().call_soon(follower.take, who["prefill"], delta)
        await asyncio.wait([call])
        assert not len(serve.ledger.sent)
        made.executor.gate.set()
        await until(lambda: serve.is_idle)
        assert serve.replicas[who["decode"]].engine.stats().num_steps == 0


async def test_a_burst_that_is_handed_over_is_not_computed_again() -> None:
    prompts = [tuple(range(number, number + 81)) for number in range(100, 124)]
    async with serving("a", "b", num_blocks=1024, max_num_seqs=32) as serve:
        who = await with_roles(serve)
        asked = [ask(serve, f"call-{p[0]}", prompt_token_ids=p, max_tokens=8) for p in prompts]
        for answer, prompt in zip(await asyncio.gather(*asked), prompts, strict=True):
            assert answer.tokens == [expected_tokens(prompt, 8)]
        stats = serve.replicas[who["decode"]].engine.stats()
        assert stats.num_prompt_tokens < 81 * 4
        assert stats.num_blocks_taken > 20 * 20


async def test_what_stayed_at_a_prefill_replica_leaves_when_that_drains() -> None:
    async with serving("a", "b", "c") as serve:
        await with_roles(serve, 0.6)
        prefills = [r for r, role in roles_in(serve.ledger.view).items() if role == "prefill"]
        serve.ledger.phases.rule.is_part = lambda *args: False  # type: ignore[method-assign]
        for made in serve.replicas.values():
            made.executor.pause_s = 0.01
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=80))
        await until(lambda: serve.replica_of("call") in prefills)
        owner = serve.replica_of("call")
        await until(lambda: serve.replicas[owner].engine.stats().num_generated_tokens > 5)
        (other,) = [r for r in prefills if r != owner]
        table = GuestTable(serve.replicas[other].engine.blocks._kv, tuple(hash_blocks(range(200), 4)))
        table.make_room()  # 50 of 64 blocks
        serve.replicas[other].engine._reports.note_change()
        place = serve.ledger.view.replica_ids.index(other)
        await until(lambda: serve.ledger.view.present(0.0).columns[ROOM, place] < 20)
        assert await serve.replicas[owner].engine.drain(DEADLINE_S)
        table.close()
        answer = await call
        assert answer.tokens == [expected_tokens(PROMPT, 80)]
        assert [leg.end for leg in serve.times[0].legs] == ["moved", ""]


async def test_a_replica_that_dies_after_a_handover_leaves_no_more_blocks_than_there_are() -> None:
    async with serving("a", "b") as serve:
        who = await with_roles(serve)
        for made in serve.replicas.values():
            made.executor.pause_s = 0.01
        call = asyncio.create_task(ask(serve, prompt_token_ids=PROMPT, max_tokens=60))
        await until(lambda: serve.replicas[who["decode"]].engine.stats().num_generated_tokens > 20)
        await serve.leave(who["decode"]).die()
        answer = await call
        assert answer.tokens == [expected_tokens(PROMPT, 60)]
        last = serve.placements[-1].query
        assert len(last.block_hashes) > len(HASHES)
        assert last.num_prompt_tokens > 20  # the prompt's blocks are there, those of the answer are not
