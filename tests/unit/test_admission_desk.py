"""Which requests may wait at a gateway, and which one must leave when it is full."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fixtures.cluster_views import make_query, make_stats
from fixtures.fake_serve import ask, serving
from fixtures.waiting import until

from shoal_cluster.policies.admission import AdmissionLimits, Queued
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.returning import Returning
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import admission_desk
from shoal_cluster.serve.dispatcher import Dispatcher, Waiter
from shoal_cluster.serve.explanation_codec import explanation_from_bytes, explanation_to_bytes
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_replica.errors import InvalidArgument, ResourceExhausted
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.stats import ReplicaStats
from shoal_replica.testing import expected_tokens

BUSY = make_stats(num_running=8, num_total_blocks=1000, num_free_blocks=900, step_s=0.1, token_s=1e-3)


PATIENT = LatencyObjective(ttft_s=600.0)  # on a busy machine, too: who has lost its objective goes before no newcomer


class Gateway:
    """A dispatcher over replicas that have reported the given stats once and report nothing more."""

    def __init__(self, limits: AdmissionLimits, num_gateways: int = 1, **replicas: ReplicaStats) -> None:
        self.ledger = GatewayLedger("gateway", RouteWeights(), num_gateways)
        for name, stats in replicas.items():
            self.ledger.view.join(name)
            self.ledger.view.apply_snapshot(name, stats, (), time.monotonic())
        self.dispatcher = Dispatcher(
            self.ledger,
            HoldConfig(objective=PATIENT),
            limits,
            lambda num_tokens: nullcontext(),
            patience_s=30.0,
            is_growing=lambda: False,
            start_failure=lambda: "",
        )

    def enter(self, request_id: str, num_prompt_tokens: int = 160, **changes: object) -> Waiter:
        query = make_query(num_prompt_tokens, request_id=request_id)
        pending = PendingRequest(query=query, arrival_s=time.monotonic(), **changes)  # type: ignore[arg-type]
        try:
            return self.dispatcher.enter(pending)
        except BaseException:
            self.dispatcher.leave(pending)
            raise


def check_replay(gateway: Gateway, request_id: str) -> None:
    """Its refusal is answered the same from its record, here and where it is told."""
    explanation = gateway.dispatcher.explain(request_id)
    for (refusal,) in (explanation.refusals, explanation_from_bytes(explanation_to_bytes(explanation)).refusals):
        assert refusal.record is not None
        assert not refusal.record.admission.admitted
        assert refusal.record.replay() == refusal.record.admission


async def test_the_urgent_are_let_in_whatever_waits_behind_them_and_the_last_has_to_go() -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_requests=10), a=BUSY)
    bulk = [gateway.enter(f"bulk{i}", tenant="bulk", priority=10) for i in range(10)]
    with pytest.raises(ResourceExhausted, match="queue is full"):
        gateway.enter("more", tenant="bulk", priority=10)
    urgent = [gateway.enter(f"urgent{i}", tenant="light", priority=-10) for i in range(3)]
    assert gateway.dispatcher.num_held == 10
    assert not any(waiter.turn.done() for waiter in urgent + bulk[:7])
    for number in (7, 8, 9):
        with pytest.raises(ResourceExhausted, match="queue is full"):
            bulk[number].turn.result()
        check_replay(gateway, f"bulk{number}")


async def test_what_has_been_placed_before_is_neither_refused_nor_pushed_out() -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_requests=2), a=BUSY)
    first = gateway.enter("first")
    again = gateway.enter("again", priority=5, is_admitted=True)
    third = gateway.enter("third", priority=5, is_admitted=True)
    urgent = gateway.enter("urgent", priority=-5)
    assert not any(waiter.turn.done() for waiter in (again, third, urgent))
    with pytest.raises(ResourceExhausted):
        first.turn.result()


async def test_what_a_replica_had_taken_is_not_refused_when_that_is_gone() -> None:
    async with serving("a", "b", max_num_seqs=1) as serve:
        dispatcher = serve.hold(AdmissionLimits(max_waiting_requests=4))
        for made in serve.replicas.values():
            made.executor.gate.clear()
        taken = [asyncio.create_task(ask(serve, f"taken{i}", prompt_token_ids=range(9 * i, 9 * i + 8))) for i in (0, 1)]
        await until(lambda: all(made.executor.is_held for made in serve.replicas.values()))
        later = [asyncio.create_task(ask(serve, f"later{i}", prompt_token_ids=range(90, 98))) for i in range(5)]
        await until(lambda: dispatcher.num_held == 5)
        gone = serve.replicas["a"]
        await gone.die()
        serve.leave("a")
        await until(lambda: dispatcher.num_held == 6)
        serve.replicas["b"].executor.gate.set()
        answers = await asyncio.gather(*taken)
        assert [answer.tokens for answer in answers] == [[expected_tokens(range(9 * i, 9 * i + 8), 4)] for i in (0, 1)]
        await asyncio.gather(*later)
        gone.executor.gate.set()


async def test_the_refused_are_told_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes 1 ms; each prompt has 160."""
    now = time.monotonic()
    monkeypatch.setattr(admission_desk, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    gateway = Gateway(AdmissionLimits(max_waiting_requests=4), a=BUSY, b=BUSY)
    for number in range(7):
        gateway.enter(f"held{number}")
    told: list[float] = []
    for number in range(10):
        with pytest.raises(ResourceExhausted) as refused:
            gateway.enter(f"refused{number}")
        assert refused.value.retry_after_s is not None
        told.append(refused.value.retry_after_s)
        check_replay(gateway, f"refused{number}")
    steps = [after - before for before, after in itertools.pairwise(told[2:])]
    assert steps == pytest.approx([0.08] * 7, abs=0.001)  # two replicas work on it


async def test_who_is_pushed_out_is_told_when_all_that_is_held_is_done() -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_requests=10), a=BUSY)
    last = gateway.enter("last", num_prompt_tokens=1600, priority=1)
    for number in range(9):
        gateway.enter(f"held{number}", num_prompt_tokens=1600)
    gateway.enter("urgent", priority=-1)
    with pytest.raises(ResourceExhausted) as refused:
        last.turn.result()
    assert refused.value.retry_after_s == pytest.approx(10 * 1.6 + 0.16)
    check_replay(gateway, "last")


def test_returning_counts_those_that_are_to_come() -> None:
    returning = Returning()
    for returns_s, num_tokens in ((3.0, 10), (1.0, 20), (2.0, 40)):
        returning.note(num_tokens, returns_s)
    assert [returning.num_tokens(now) for now in (0.0, 1.0, 2.5, 3.0)] == [70, 50, 10, 0]


async def test_who_is_too_late_is_told_when_those_that_were_refused_are_done() -> None:
    gateway, now = Gateway(AdmissionLimits(objective=LatencyObjective(ttft_s=0.5)), a=BUSY), time.monotonic()
    gateway.dispatcher.desk._returning.note(8000, now + 60.0)
    with pytest.raises(ResourceExhausted) as refused:
        gateway.dispatcher.desk.time_left_s(PendingRequest(query=make_query(), arrival_s=now - 50.0))
    assert refused.value.retry_after_s == pytest.approx(8.0)


async def test_who_is_too_late_is_told_when_the_other_gateways_are_done_as_well() -> None:
    gateway = Gateway(AdmissionLimits(objective=LatencyObjective(ttft_s=0.5)), 4, a=BUSY)
    gateway.enter("held", 1600)
    late = PendingRequest(query=make_query(request_id="late"), arrival_s=time.monotonic() - 50.0)
    with pytest.raises(ResourceExhausted) as refused:
        gateway.dispatcher.desk.time_left_s(late)
    assert refused.value.retry_after_s == pytest.approx(4 * 1.6)
    check_replay(gateway, "late")


async def test_what_is_cached_of_a_refused_prompt_does_not_come_back() -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_requests=1), a=BUSY)
    gateway.enter("held")
    hashes = tuple(hash_blocks(range(160), 16))
    gateway.ledger.view.apply_update("a", BUSY, hashes[:9], (), time.monotonic())
    query = make_query(160, request_id="cached", block_hashes=hashes)
    with pytest.raises(ResourceExhausted):
        gateway.dispatcher.enter(PendingRequest(query=query, arrival_s=time.monotonic(), priority=1))
    assert gateway.dispatcher.desk._returning.num_tokens(0.0) == 160 - 9 * 16


async def test_other_gateways_hold_and_refuse_as_much_as_this_one() -> None:
    desk = Gateway(AdmissionLimits(), 4, a=BUSY).dispatcher.desk
    desk._returning.note(1000, time.monotonic() + 60.0)
    assert desk._at_all_gateways(10, 2) == Queued(40, 8, 4000)


@pytest.mark.parametrize(("num_gateways", "by_tokens", "by_number"), [(1, 50, 50), (4, 13, 13)])
async def test_gateways_share_the_limits(num_gateways: int, by_tokens: int, by_number: int) -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_tokens=8000), num_gateways, a=BUSY)
    for number in range(by_tokens):
        gateway.enter(f"call{number}")
    with pytest.raises(ResourceExhausted):
        gateway.enter("more")
    gateway = Gateway(AdmissionLimits(max_waiting_requests=50), num_gateways, a=BUSY)
    for number in range(100):
        gateway.enter(f"call{number}", priority=-number)  # each goes before all others
    assert gateway.dispatcher.num_held == by_number


async def test_while_there_is_no_replica_the_last_has_to_go() -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_requests=5), a=BUSY)
    gateway.ledger.view.disconnect("a")
    bulk = [gateway.enter(f"bulk{number}", priority=10) for number in range(5)]
    urgent = gateway.enter("urgent", priority=-10)
    assert [waiter.turn.done() for waiter in (*bulk, urgent)] == [False] * 4 + [True, False]
    with pytest.raises(ResourceExhausted, match="no replica can take requests now, and 5 wait already"):
        bulk[4].turn.result()
    check_replay(gateway, "bulk4")
    with pytest.raises(ResourceExhausted, match="and 5 wait already"):
        gateway.enter("late", priority=10)


@pytest.mark.parametrize(("num_gateways", "num_held"), [(1, 10), (4, 2)])
async def test_gateways_share_the_limit_of_tokens_while_there_is_no_replica(num_gateways: int, num_held: int) -> None:
    gateway = Gateway(AdmissionLimits(max_waiting_tokens=1600), num_gateways, a=BUSY)
    gateway.ledger.view.disconnect("a")
    for number in range(num_held):
        gateway.enter(f"call{number}")
    with pytest.raises(ResourceExhausted, match="no replica can take requests now"):
        gateway.enter("more")


async def test_a_request_for_the_large_replica_waits_while_that_is_away() -> None:
    small = make_stats(num_total_blocks=20)
    gateway = Gateway(AdmissionLimits(), large=BUSY, small=small)
    gateway.ledger.view.disconnect("large")
    waiter = gateway.enter("large-one", num_prompt_tokens=1600)
    assert not waiter.turn.done()
    gateway.ledger.view.apply_snapshot("large", make_stats(num_total_blocks=1000), (), time.monotonic())
    gateway.dispatcher.take_turn()
    assert waiter.turn.result().decision.best == "large"
    with pytest.raises(InvalidArgument, match="the largest replica has 1000"):
        gateway.enter("too-large", num_prompt_tokens=160_000)


async def test_a_resumed_stream_is_due_at_once_at_its_new_replica() -> None:
    """Its first token was due long ago, so with a renewed due date every newcomer would go before it there."""
    gateway = Gateway(AdmissionLimits(), a=make_stats(num_total_blocks=1000))
    query, now = make_query(160, request_id="stream#2"), time.monotonic()
    pending = PendingRequest(query=query, arrival_s=now - 50.0, is_admitted=True, priority=RESUMED_PRIORITY)
    dispatch = gateway.dispatcher.enter(pending).turn.result()
    assert dispatch.due_s <= time.monotonic()
    newcomer = gateway.enter("newcomer").turn.result()
    assert newcomer.due_s > time.monotonic() + 1.0
    assert math.isfinite(newcomer.due_s)


async def test_a_resumed_stream_is_never_too_late() -> None:
    desk = Gateway(AdmissionLimits(objective=LatencyObjective(ttft_s=0.5)), a=BUSY).dispatcher.desk
    now = time.monotonic()
    late = PendingRequest(query=make_query(), arrival_s=now - 50.0, deadline_s=now)
    with pytest.raises(ResourceExhausted):
        desk.time_left_s(late)
    assert desk.time_left_s(replace(late, priority=RESUMED_PRIORITY)) == math.inf


async def test_whoever_leaves_is_wished_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, told = Gateway(AdmissionLimits(), 2, a=BUSY), list[list[str]]()
    monkeypatch.setattr(gateway.ledger, "wish", lambda wishes: told.append([*wishes]))
    gateway.dispatcher.leave(gateway.enter("call").pending)
    assert told == [["a"], []]
