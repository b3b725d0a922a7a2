"""Requests that wait at the gateway: the order in which they are sent, where, and when waiting is better."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_stats
from msgspec import structs

from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.pending import MOST_SIZES, PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import PRICED_STEPS
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.policies.routing import RouteWeights, route
from shoal_cluster.policies.to_consider import MAX_FIRST_MATCH_AGE_S
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.policies.yielding import Yielding
from shoal_replica.errors import ConfigError
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.stats import ReplicaStats

WEIGHTS = RouteWeights()
CONFIG = HoldConfig(objective=LatencyObjective(), prefill=PrefillTime(tokens_per_s=1000.0, pair_s=0.0))
PREFIX = hash_blocks(range(1600), 16)
BUSY = make_stats(num_waiting_tokens=300)  # more than a step of 256: it can start nothing now


def view_of(**stats: ReplicaStats) -> ClusterView:
    view = ClusterView(max_index_entries=4096)
    for replica_id, its_stats in stats.items():
        view.join(replica_id)
        view.apply_snapshot(replica_id, its_stats, (), 0.0)
    return view


def pending(
    request_id: str,
    num_tokens: int = 160,
    *,
    arrival_s: float = 0.0,
    hashes: list[BlockHash] | None = None,
    **more: object,
) -> PendingRequest:
    query = make_query(num_tokens, request_id=request_id, block_hashes=tuple(hashes or ()))
    return PendingRequest(query=query, arrival_s=arrival_s, **more)  # type: ignore[arg-type]


def queue_of(*requests: PendingRequest, config: HoldConfig = CONFIG, is_one_of_many: bool = False) -> PendingQueue:
    queue = PendingQueue(config, is_one_of_many)
    for request in requests:
        queue.push(request)
    return queue


def send(queue: PendingQueue, view: ClusterView, now: float = 0.0) -> list[tuple[str, str]]:
    """Send everything that can go now, reserving room for each as the gateway does. Returns request and replica ids."""
    sent = []
    while (dispatch := queue.next(view, WEIGHTS, now, Random(0))) is not None:
        query = dispatch.pending.query
        view.reserve(query.request_id, dispatch.decision.best, query.num_blocks_needed, query.num_prompt_tokens)
        sent.append((query.request_id, dispatch.decision.best))
    return sent


def test_a_replica_gets_what_it_can_start_and_the_rest_waits() -> None:
    """Steps have 256 tokens: the second prompt of 160 still starts within one step, the third does not."""
    queue = queue_of(*(pending(f"r{i}") for i in range(3)))
    view = view_of(only=make_stats())
    assert send(queue, view) == [("r0", "only"), ("r1", "only")]
    assert [p.query.request_id for p in queue] == ["r2"]
    view.settle(["r0", "r1"])
    assert send(queue, view) == [("r2", "only")]
    assert queue.next(view, WEIGHTS, 0.0, Random(0)) is None


@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_while_there_is_no_replica_everything_waits(is_one_of_many: bool) -> None:
    """One of several gateways plans all that it holds, and the last replica may leave meanwhile."""
    queue, view = queue_of(*(pending(f"r{i}") for i in range(5)), is_one_of_many=is_one_of_many), view_of()
    assert send(queue, view) == []
    view.join("one")
    view.apply_snapshot("one", make_stats(), (), 1.0)
    assert send(queue, view, 1.0) == [("r0", "one"), ("r1", "one")]
    view.leave("one")
    assert send(queue, view, 2.0) == []
    assert len(queue) == 3


def test_where_due_dates_are_kept_what_the_next_step_ends_is_there_before_it_begins() -> None:
    """Prompts are sent while they fit into two steps of 256 tokens, behind only what is due no later."""
    queue = queue_of(*(pending(f"r{i}", 100) for i in range(5)), pending("long", 500))
    view = view_of(only=make_stats(by_due=True, num_waiting_tokens=100, due_tokens=(0, 0, *[100] * 5)))
    assert send(queue, view) == [(f"r{i}", "only") for i in range(4)]
    view.apply_update("only", make_stats(by_due=True, num_waiting_tokens=600, due_tokens=(*[0] * 6, 600)), (), (), 0.0)
    view.settle([f"r{i}" for i in range(4)])
    assert send(queue, view) == [("r4", "only"), ("long", "only")], "whatever is there is due later"


@pytest.mark.parametrize(
    ("num_tokens", "num_waiting_tokens", "is_sent"),
    [(500, 257, True), (511, 257, True), (512, 257, False), (257, 511, True), (257, 512, False), (256, 257, False)],
)
def test_a_prompt_longer_than_a_step_fills_the_next_one_where_the_one_after_ends_it(
    num_tokens: int, num_waiting_tokens: int, is_sent: bool
) -> None:
    """Steps have 256 tokens."""
    view = view_of(only=make_stats(by_due=True, num_waiting_tokens=num_waiting_tokens))
    assert bool(send(queue_of(pending("long", num_tokens)), view)) == is_sent
    view = view_of(only=make_stats(by_due=False, num_waiting_tokens=num_waiting_tokens))
    assert not send(queue_of(pending("long", num_tokens)), view)


def test_nothing_goes_ahead_to_a_replica_that_keeps_the_order_of_arrival() -> None:
    view = view_of(only=make_stats(num_waiting_tokens=257))
    assert send(queue_of(pending("short", 10)), view) == []
    assert send(queue_of(pending("short", 10)), view_of(only=make_stats(num_waiting_tokens=257, by_due=True))) != []
    assert send(queue_of(pending("short", 10)), view_of(only=make_stats(num_waiting_tokens=503, by_due=True))) == []


@pytest.mark.parametrize(
    "stats",
    [
        make_stats(num_waiting_tokens=257),
        make_stats(num_free_blocks=10),
        make_stats(num_free_blocks=0),
        make_stats(num_running=8),
        make_stats(draining=True),
    ],
)
def test_nothing_goes_to_a_replica_that_cannot_start_it(stats: ReplicaStats) -> None:
    queue = queue_of(pending("r"))
    assert send(queue, view_of(only=stats)) == []
    assert len(queue) == 1
    assert send(queue, view_of(only=stats, other=make_stats())) == [("r", "other")]


def test_a_replica_that_lost_a_request_does_not_get_it_again() -> None:
    lost = pending("lost")
    lost = replace(lost, query=replace(lost.query, excluded=frozenset({"old"})))
    queue = queue_of(lost, pending("other"))
    assert send(queue, view_of(old=make_stats())) == [("other", "old")]
    assert [p.query.request_id for p in queue] == ["lost"]
    assert send(queue, view_of(old=make_stats(), new=make_stats())) == [("lost", "new")]


def test_what_is_due_later_is_not_in_the_way_of_what_is_due_sooner() -> None:
    """3 000 tokens wait, due in 16 to 32 s: a request due in 2.3 s goes ahead of them, one due in 34 s waits."""
    stats = make_stats(num_waiting_tokens=3000, due_tokens=(0, 0, 0, 0, 0, 3000, 3000), num_total_blocks=2000)
    queue = queue_of(pending("short"), pending("long", 16_000))
    assert send(queue, view_of(only=stats)) == [("short", "only")]
    assert "long" in queue


def test_the_earliest_due_goes_first_and_long_prompts_have_longer() -> None:
    """Due 2 s + 2 x prefill after arrival: the short request at 3.2 s, the long one, which came first, at 4 s."""
    queue = queue_of(pending("long", 1000), pending("short", 100, arrival_s=1.0))
    dispatch = queue.next(view_of(only=make_stats()), WEIGHTS, 1.0, Random(0))
    assert dispatch is not None
    assert dispatch.pending.query.request_id == "short"
    assert dispatch.due_s == pytest.approx(3.2)


def test_what_is_lost_goes_after_what_can_be_met_but_not_for_ever() -> None:
    lost, fresh = pending("lost", arrival_s=0.0), pending("fresh", arrival_s=5.0)
    assert queue_of(lost, fresh).next(view_of(only=make_stats()), WEIGHTS, 5.0, Random(0)).pending is fresh  # type: ignore[union-attr]
    later = pending("later", arrival_s=9.0)  # due at 11.3 s; the lost one, put off to 4 x its 2.3 s, at 9.3 s
    assert queue_of(lost, later).next(view_of(only=make_stats()), WEIGHTS, 9.0, Random(0)).pending is lost  # type: ignore[union-attr]


def test_what_can_be_met_is_judged_by_the_pace_that_replicas_measure() -> None:
    """160 tokens at 5 ms take 0.8 s and are due after 2 + 1.6 s: the older one can meet that at 2.7 s, not at 2.9 s."""
    older, fresh = pending("older", arrival_s=0.0), pending("fresh", arrival_s=2.7)
    assert queue_of(older, fresh).next(view_of(only=make_stats()), WEIGHTS, 2.7, Random(0)).pending is fresh  # type: ignore[union-attr]
    slow = view_of(only=make_stats(token_s=0.005))
    assert queue_of(older, fresh).next(slow, WEIGHTS, 2.7, Random(0)).pending is older  # type: ignore[union-attr]
    assert queue_of(older, fresh).next(slow, WEIGHTS, 2.9, Random(0)).pending is fresh  # type: ignore[union-attr]


def test_what_can_be_met_counts_the_step_that_runs_and_what_goes_before() -> None:
    """The older request is due in 0.62 s. It takes 0.16 s, and half a step of 0.256 s more where prompts share steps.
    That leaves time to wait 0.3 s for the running step and the prompts before it, but not 0.5 s.
    """
    older, fresh = pending("older", arrival_s=0.0), pending("fresh", arrival_s=1.7)
    for num_waiting_tokens, step_s, first in ((0, 0.3, older), (200, 0.1, older), (200, 0.3, fresh)):
        stats = make_stats(num_running=1, step_s=step_s, num_waiting_tokens=num_waiting_tokens)
        dispatch = queue_of(older, fresh).next(view_of(only=stats), WEIGHTS, 1.7, Random(0))
        assert dispatch is not None
        assert dispatch.pending is first, (num_waiting_tokens, step_s)


def test_what_seemed_lost_is_not_once_another_replica_has_come() -> None:
    older, fresh = pending("older", arrival_s=0.0), pending("fresh", arrival_s=1.8)
    queue = queue_of(older, fresh)
    view = view_of(only=make_stats(num_running=8, step_s=1.0, token_s=0.001))
    assert queue.next(view, WEIGHTS, 1.8, Random(0)) is None, "no slot is free; the older one is put off meanwhile"
    view.join("other")
    view.apply_snapshot("other", make_stats(), (), 1.9)
    dispatch = queue.next(view, WEIGHTS, 1.95, Random(0))
    assert dispatch is not None
    assert dispatch.pending is older


def test_what_is_put_off_and_not_considered_gets_its_date_again_by_any_news() -> None:
    """Only the other request is considered; it waits for its cached prefix, whatever the other replicas report. Due
    dates are made for both every tenth of a second.
    """
    busy = make_stats(num_total_blocks=400, num_running=1, step_s=0.3, token_s=0.001)
    view = view_of(a=busy, b=busy, c=busy)
    view.apply_snapshot("a", structs.replace(busy, num_waiting_tokens=700), PREFIX, 0.0)
    older, cached = pending("older", arrival_s=0.0), pending("cached", 1600, arrival_s=1.9, hashes=PREFIX)
    queue = queue_of(older, cached, config=replace(CONFIG, max_considered=1))
    for _ in range(2):
        assert queue.next(view, WEIGHTS, 2.0, Random(0)) is None, "the older one would come too late"
    view.apply_update("c", structs.replace(busy, num_running=0), (), (), 2.05)
    dispatch = queue.next(view, WEIGHTS, 2.11, Random(0))
    assert dispatch is not None
    assert dispatch.pending.query.request_id == "older"


def test_where_not_all_can_be_in_time_the_longest_is_put_off() -> None:
    """The long prompt takes 1.5 s and is due first. Ahead of the short ones it would make seven or more late."""
    shorts = [pending(f"short{i:02}", arrival_s=2.0) for i in range(12)]
    queue, view = queue_of(pending("long", 1500, arrival_s=-1.0), *shorts), view_of(only=make_stats())
    assert [name for name, _ in send(queue, view, now=2.0)] == ["short00", "short01"]
    (*before, its), count = queue.up_to("long", 2.0, 100)
    assert [place.request_id for place in before] == [f"short{i:02}" for i in range(2, 12)]
    assert queue.up_to("long", 2.0, 1) == ((its,), count) == ((its,), 11)
    assert its.due_in_s == pytest.approx(4 * 5.0 - 3.0)
    assert queue.before("short11") == (9 * 160, 9)
    assert queue.before("long") == (0, 0), "had it not been put off"
    queue.push(pending("later", 100, arrival_s=2.5))
    assert queue.before("later") == (10 * 160, 10), "the lost one fills no queue"
    queue.remove("later")
    for short in shorts[5:]:
        queue.remove(short.query.request_id)
    view.settle(["short00", "short01"])
    assert [name for name, _ in send(queue, view, now=2.2)] == ["long"], "there is time for all now"


def test_what_is_lost_fills_no_queue_for_others() -> None:
    """40 requests arrived 10 s ago. They go before a later one while they are due before it, not once put off."""
    lost = [pending(f"lost{i}", arrival_s=0.0) for i in range(40)]
    queue = queue_of(*lost, pending("soon", 100, arrival_s=9.0))
    view = view_of(only=make_stats(num_running=8))
    assert queue.before("soon") == (40 * 160, 40), "before anybody has looked: all are due before"
    assert queue.next(view, WEIGHTS, 10.0, Random(0)) is None
    assert queue.before("soon") == (0, 0), "lost by then, and at 9.3 s too: due at 37 s"
    queue.push(pending("later", 100, arrival_s=10.0))
    assert queue.before("later") == (100, 1)


def test_priority_goes_before_due_dates() -> None:
    queue = queue_of(pending("batch", priority=1), pending("now", arrival_s=3.0))
    assert send(queue, view_of(only=make_stats()), now=3.0)[0] == ("now", "only")


def test_a_hit_is_worth_waiting_for_and_others_pass_meanwhile() -> None:
    """1 488 cached tokens at their price outweigh 3 000 that wait; a request without a hit starts elsewhere."""
    view = view_of(owner=make_stats(num_waiting_tokens=3000), idle=make_stats())
    view.apply_update("owner", make_stats(num_waiting_tokens=3000), PREFIX, (), 0.0)
    queue = queue_of(pending("friend", 1500, hashes=PREFIX[:93]), pending("stranger", arrival_s=1.0))
    assert send(queue, view, 1.0) == [("stranger", "idle")]
    view.settle(["stranger"])
    view.apply_update("owner", make_stats(num_free_blocks=50), (), (), 1.0)
    assert send(queue, view, 1.0) == [("friend", "owner")]


def test_a_hot_prefix_spreads_when_its_owner_saturates() -> None:
    free = make_stats(num_total_blocks=1000, max_num_seqs=64)
    busy = structs.replace(free, num_waiting_tokens=3000)
    view = view_of(owner=busy, idle=free)
    view.apply_update("owner", busy, PREFIX, (), 0.0)
    for count, num_alike in ((2, 1), (3, 1), (4, 4), (7, 4), (30, 16)):
        queue = queue_of(*(pending(f"r{i:02}", 1900, arrival_s=i / 100, hashes=PREFIX) for i in range(count)))
        dispatch = queue.next(view, WEIGHTS, 1.0, Random(0))
        # The prefix is paid for by those that will find it there: with one holder already, by half of all.
        cold, hot = WEIGHTS.prefill_price * (300 + 1600 / max(1, num_alike / 2)), WEIGHTS.prefill_price * 300 + 3000
        # Requests before it wait for the owner, while that costs less.
        num_waiting = max(0, math.ceil((cold - hot) / (300 + WEIGHTS.decode_price)))
        assert (dispatch is not None) == (num_waiting < count), count
        if dispatch is not None:
            assert dispatch.decision.best == "idle"
            assert int(dispatch.candidates.num_reserved[1]) == num_waiting
            assert dispatch.pending.query.num_alike == num_alike


def test_what_waits_long_for_its_cheapest_replica_goes_where_none_waits_and_it_begins_sooner() -> None:
    """Due 5.8 s after its arrival; a second has 1 000 tokens. The owner computes its 300 after those that wait there,
    an idle replica all its 1 900. Nobody takes an idle replica out of turn where there is not one for each that waits.
    """
    free = make_stats(num_total_blocks=1000, max_num_seqs=64)
    asked = pending("asked", 1900, hashes=PREFIX)

    def goes_to(
        num_waiting_tokens: int, now: float, *others: PendingRequest, roles: dict[str, Phase] | None = None
    ) -> str | None:
        busy = structs.replace(free, num_waiting_tokens=num_waiting_tokens)
        view = view_of(owner=busy, idle=free)
        view.apply_update("owner", busy, PREFIX, (), 0.0)
        view.set_roles(roles or {})
        dispatch = queue_of(asked, *others).next(view, WEIGHTS, now, Random(0))
        if dispatch is None:
            return None
        record = RouteRecord(
            0.0, dispatch.pending.query, dispatch.candidates, WEIGHTS, dispatch.seed, dispatch.decision
        )
        assert record.replay() == dispatch.decision
        assert dispatch.look.replay() == (dispatch.look.assignments, True)
        (idle,) = [c for c in dispatch.decision.candidates if c.replica_id == "idle"]
        assert sum(value for name, value in idle.terms if not name.endswith(("_blocks", "_slots"))) == idle.score
        return dispatch.decision.best

    assert goes_to(2700, 0.0) == "idle", "half of the time left to it is 2.9 s"
    assert goes_to(2500, 0.0) is None
    assert goes_to(2500, 1.0) == "idle", "2.4 s"
    assert goes_to(1700, 9.0) == "idle", "also if its objective is lost"
    assert goes_to(1500, 9.0) is None, "the idle one would begin later"
    assert goes_to(2700, 0.0, pending("other", 1900, hashes=PREFIX)) is None
    assert goes_to(2700, 0.0, roles={"owner": "prefill"}) is None, "who is idle may be for others"


@pytest.mark.parametrize("count", [16, 32, 64])
def test_each_in_a_burst_knows_of_the_copies_made_before_it(count: int) -> None:
    free = make_stats(num_total_blocks=4000, max_num_seqs=64)
    busy = structs.replace(free, num_waiting_tokens=4000)
    view = view_of(owner=busy, **dict.fromkeys("abcde", free))
    view.apply_update("owner", busy, PREFIX, (), 0.0)
    queue = queue_of(*(pending(f"r{i:02}", 1700, arrival_s=i / 100, hashes=PREFIX) for i in range(count)))
    told, rng = list[int](), Random(0)
    while (dispatch := queue.next(view, WEIGHTS, 1.0, rng)) is not None:
        query, matched = dispatch.pending.query, dispatch.candidates.num_matched_blocks
        assert query.num_alike == 1 or query.num_holders == np.count_nonzero(matched == 100)
        told.append(query.num_holders)
        view.reserve(query.request_id, dispatch.decision.best, 11, 160)
        place = dispatch.candidates.replica_ids.index(dispatch.decision.best)
        view.expect(query.request_id, dispatch.decision.best, query.block_hashes, int(matched[place]))
    assert max(told) >= 1
    assert queue.next(view, WEIGHTS, 1.0, rng) is None


def test_who_waits_for_a_role_for_long_goes_anywhere_and_is_like_others_then() -> None:
    full = make_stats(num_total_blocks=1000, num_waiting_tokens=3000)
    view = view_of(decodes=full, prefills=make_stats(num_total_blocks=1000))
    view.set_roles({"decodes": "decode", "prefills": "prefill"})
    view.apply_update("decodes", full, PREFIX, (), 0.0)
    requests = [pending(f"r{i}", 1700, hashes=PREFIX) for i in range(4)]
    queue = queue_of(*(replace(one, query=replace(one.query, phase="decode")) for one in requests))
    assert send(queue, view, 0.0) == []
    assert [one.query.phase for one in queue] == ["decode"] * 4
    view.apply_update("decodes", full, (), (), 0.5)
    dispatch = queue.next(view, WEIGHTS, 0.5, Random(0))
    assert dispatch is not None
    assert (dispatch.decision.best, dispatch.pending.query.phase) == ("prefills", "")
    assert dispatch.pending.query.num_alike == 4
    assert [one.query.phase for one in queue] == [""] * 3


def test_a_dispatch_decides_the_same_again() -> None:
    queue = queue_of(*(pending(f"r{i}") for i in range(5)))
    view = view_of(a=make_stats(), b=make_stats(), c=make_stats(num_running=1))
    rng = Random(7)
    dispatches: list[Dispatch] = []
    while (dispatch := queue.next(view, WEIGHTS, 0.0, rng)) is not None:
        dispatches.append(dispatch)
        view.reserve(dispatch.pending.query.request_id, dispatch.decision.best, 11, 160)
    assert len(dispatches) == 5
    for d in dispatches:
        assert route(d.pending.query, d.candidates, WEIGHTS, Random(d.seed)) == d.decision
        assert d.decision.ranked[0] == d.decision.best


def test_removed_requests_are_gone() -> None:
    queue = queue_of(pending("r"))
    assert "r" in queue
    with pytest.raises(ValueError, match="held already"):
        queue.push(pending("r"))
    assert queue.remove("r") is not None
    assert queue.remove("r") is None
    assert send(queue, view_of(only=make_stats())) == []


def test_a_light_tenant_does_not_queue_behind_a_heavy_one() -> None:
    heavy = [pending(f"heavy{i}", 200, tenant="heavy", arrival_s=i / 1000) for i in range(40)]
    queue = queue_of(*heavy, pending("light", 200, tenant="light", arrival_s=0.5))
    order: list[str] = []
    for _ in range(41):
        ((request_id, _),) = send(queue, view_of(only=make_stats(max_num_batched_tokens=8)), 0.5)
        order.append(request_id)
    assert order.index("light") <= 2


def test_who_asks_for_what_is_cached_is_no_flood() -> None:
    """One tenant has long prompts, mostly cached, beside 14 tenants with short ones that get most of the service."""
    stats = make_stats(num_total_blocks=10_000, max_num_seqs=256, max_num_batched_tokens=2048)
    view, queue = view_of(only=stats), PendingQueue(HoldConfig())
    hashes = hash_blocks(range(14_400), 16)
    view.apply_snapshot("only", stats, hashes, 0.0)
    for number in range(1500):
        now, is_chat = number * 0.02, number % 15 == 0
        name = "chat" if is_chat else f"t{number % 15}"
        size, cached = (16_000, hashes) if is_chat else (160, [])
        queue.push(pending(f"r{number}", size, hashes=cached, tenant=name, arrival_s=now))
        dispatch = queue.next(view, WEIGHTS, now, Random(0))
        assert dispatch is not None
        assert not dispatch.yields


def test_who_is_refused_has_asked_for_nothing() -> None:
    queue, view = PendingQueue(HoldConfig()), view_of(only=make_stats(max_num_batched_tokens=2048))
    for number in range(600):
        for attempt in range(20):
            queue.push(pending("refused", 9_000, tenant="first", arrival_s=number * 0.02))
            assert queue.remove("refused") is not None, attempt
        name = "first" if number % 3 == 0 else f"t{number % 14}"
        queue.push(pending(f"r{number}", 160, tenant=name, arrival_s=number * 0.02))
        dispatch = queue.next(view, WEIGHTS, number * 0.02, Random(0))
        assert dispatch is not None
        assert not dispatch.yields


def test_who_comes_may_change_who_is_heavy_and_so_what_was_planned() -> None:
    """Beside two newcomers that have had nothing, one tenant is heavy: another's waiting requests pass what yields."""
    busy = make_stats(num_waiting_tokens=300)
    later = make_stats(num_waiting_tokens=500, due_tokens=(*[0] * 5, 500, 500))
    queue, view = PendingQueue(HoldConfig()), view_of(busy=busy, later=later)
    weights = RouteWeights(decode_price=0.0)
    for number, (tenant, num_tokens) in enumerate([("heavy", 400), ("heavy", 400), ("light", 350)]):
        queue.push(pending(f"before{number}", num_tokens, tenant=tenant))
        assert queue.next(view_of(gone=make_stats()), weights, 0.0, Random(0)) is not None
    for number in range(2):
        queue.push(pending(f"light{number}", 160, tenant="light", arrival_s=0.5))
    assert queue.next(view, weights, 0.5, Random(0)) is None
    for number in range(2):
        queue.push(pending(f"new{number}", 9000, tenant=f"new{number}", arrival_s=0.5))
    dispatch = queue.next(view, weights, 0.5, Random(0))
    assert dispatch is not None
    assert (dispatch.pending.query.request_id, dispatch.decision.best) == ("light0", "later")


def test_an_old_debt_does_not_starve_who_comes_back() -> None:
    """A tenant chats for 150 s beside another's batch request; two minutes later it asks once more, before a flood."""
    queue, view = PendingQueue(CONFIG), view_of(only=make_stats(max_num_batched_tokens=2048, num_free_blocks=50))
    queue.push(pending("batch", 1500, tenant="patient", priority=10))
    for number in range(600):
        now = number / 4
        queue.push(pending(f"chat{number}", arrival_s=now, tenant="chats"))
        dispatch = queue.next(view, WEIGHTS, now, Random(0))
        assert dispatch is not None
        assert dispatch.pending.tenant == "chats"
    queue.push(pending("late", arrival_s=270.0, tenant="chats"))
    for number in range(40):
        queue.push(pending(f"flood{number}", arrival_s=270.0, tenant="flood"))
    order = []
    while not order or order[-1] != "late":
        dispatch = queue.next(view, WEIGHTS, 270.0, Random(0))
        assert dispatch is not None
        order.append(dispatch.pending.query.request_id)
    assert len(order) <= 3


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("by", ["size", "exclusion"])
def test_what_only_some_replicas_may_take_keeps_nobody_from_the_others(is_there: bool, by: str) -> None:
    full = make_stats(num_running=8, num_free_blocks=10, num_total_blocks=400 if by == "size" else 100)
    queue, view = PendingQueue(CONFIG), view_of(other=full, idle=make_stats(num_total_blocks=100))
    for number in range(CONFIG.max_considered + 8):
        its = pending(f"picky{number}", 1900 if by == "size" else 160, priority=-1)
        if by == "exclusion":
            its = replace(its, query=replace(its.query, excluded=frozenset({"idle"})))
        queue.push(its)
    assert send(queue, view) == []
    if not is_there:
        view.disconnect("other")
    queue.push(pending("any", 160, arrival_s=0.1))
    assert send(queue, view, 0.1) == [("any", "idle")]


def test_who_had_less_passes_what_yields_and_goes_where_nothing_of_its_own_is_before_it() -> None:
    """One replica has the light tenant's earlier prompt to compute, the other ten times as much of the heavy tenant,
    which has had four more requests.
    """
    view = view_of(
        own=make_stats(num_waiting_tokens=1000, max_num_batched_tokens=2048, due_tokens=(0, 0, *[1000] * 5)),
        other=make_stats(num_waiting_tokens=10_000, max_num_batched_tokens=2048, due_tokens=(*[0] * 4, *[10_000] * 3)),
    )
    rng = Random(0)
    queue = PendingQueue(CONFIG)
    for number in range(4):
        queue.push(pending(f"before{number}", 800, tenant="heavy"))
        assert queue.next(view_of(gone=make_stats()), WEIGHTS, 0.0, rng) is not None
    sent = []
    for request_id in ("heavy0", "light1", "heavy2", "light3"):
        queue.push(pending(request_id, 800 if "heavy" in request_id else 160, tenant=request_id[:-1]))
        dispatch = queue.next(view, WEIGHTS, 0.0, rng)
        assert dispatch is not None
        query, candidates = dispatch.pending.query, dispatch.candidates
        assert route(query, candidates, WEIGHTS, Random(dispatch.seed)).ranked[0] == dispatch.decision.best
        view.reserve(request_id, dispatch.decision.best, 1, query.num_prompt_tokens)
        sent.append(dispatch)
    assert [dispatch.yields for dispatch in sent] == [False, False, True, False]
    assert [dispatch.decision.best for dispatch in sent] == ["own", "other", "own", "other"]
    assert dict(sent[3].pending.query.passed) == {"own": 800, "other": 10_000}, "what yields and is on its way, too"
    assert not sent[0].pending.query.passed


def test_replicas_where_nothing_yields_are_not_told_of() -> None:
    view = view_of(
        idle=make_stats(),
        its=make_stats(num_waiting_tokens=100),
        cached=make_stats(num_waiting_tokens=40, due_tokens=(4040,) * 7),
        theirs=make_stats(num_waiting_tokens=10_000, due_tokens=(*[0] * 4, *[10_000] * 3)),
    )
    assert Yielding().passed(view, 0.0, 1.0) == (("theirs", 10_000),)
    assert Yielding().passed(view, 0.0, 60.0) == ()


def test_who_had_most_of_the_service_lately_waits_for_others_at_the_replica_too() -> None:
    view = view_of(only=make_stats())
    rng = Random(0)

    def dispatched(request_id: str, now: float) -> Dispatch:
        tenant = request_id.rstrip("0123456789")
        queue.push(pending(request_id, tenant=tenant, arrival_s=now))
        dispatch = queue.next(view, WEIGHTS, now, rng)
        assert dispatch is not None
        return dispatch

    queue = PendingQueue(CONFIG)
    alone = dispatched("heavy0", 0.0)
    assert alone.due_s == pytest.approx(2.32), "alone it has all there is"
    dispatched("light0", 0.1)
    for number in range(1, 4):
        assert dispatched(f"heavy{number}", 0.2).due_s == pytest.approx(0.2 + 2.32), "no more than a few times as much"
    heavy, light = dispatched("heavy4", 0.3), dispatched("light1", 1.5)
    assert light.due_s == pytest.approx(1.5 + 2.32)
    assert light.due_s < heavy.due_s < 0.3 + 5 * 2.32, "put off, but not for ever"


@pytest.mark.parametrize("wrong", [{"max_steps_ahead": 0}, {"max_considered": 0}])
def test_bad_settings_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HoldConfig(**wrong)
    with pytest.raises(ConfigError, match="tokens_per_s"):
        PrefillTime(tokens_per_s=0)
    with pytest.raises(ConfigError, match="ttft_s"):
        LatencyObjective(ttft_s=0)


def test_gateways_that_know_each_others_wishes_keep_one_order() -> None:
    """A replica that can start one request gets the one that is due first, whichever gateway holds it."""
    view = view_of(only=make_stats(num_waiting_tokens=200))
    view.set_wishes("only", [Wish((0, 0, 1.5), 10, 160)])
    queue = queue_of(pending("mine"), is_one_of_many=True)
    assert send(queue, view) == [], "another gateway's is due at 1.5 s, this one at 2.3 s"
    due_s = pytest.approx(2.32)
    assert queue.wishes() == {"only": (Wish((0, 0, due_s), 11, 160, 0, PRICED_STEPS, 0.0, due_s),)}
    view.set_wishes("only", [Wish((0, 0, 3.0), 10, 160)])
    assert send(queue, view) == [("mine", "only")]
    assert queue.wishes() == {}


def test_a_wish_tells_what_is_cached_where_it_is_to_go() -> None:
    view = view_of(only=make_stats(num_waiting_tokens=400))
    view.index.store("only", PREFIX[:3])
    queue = queue_of(pending("mine", hashes=PREFIX[:10]), is_one_of_many=True)
    assert send(queue, view) == []
    ((wish,),) = queue.wishes().values()
    assert (wish.num_blocks, wish.num_tokens, wish.num_cached_blocks) == (8, 112, 3)


def test_the_most_urgent_wishes_are_told() -> None:
    view = view_of(only=structs.replace(BUSY, num_waiting_tokens=5000))
    queue = queue_of(config=replace(CONFIG, max_considered=2), is_one_of_many=True)
    for arrival_s in (-0.3, -0.1, -0.5):
        queue.push(pending(str(arrival_s), 16, arrival_s=arrival_s))
        assert send(queue, view) == []
    assert [wish.arrival_s for wish in queue.wishes()["only"]] == [-0.5, -0.3]


def test_a_wish_for_one_replica_leaves_the_others_free() -> None:
    view = view_of(wanted=make_stats(num_waiting_tokens=200), other=make_stats(num_waiting_tokens=240))
    view.set_wishes("wanted", [Wish((0, 0, 1.5), 10, 160)])
    assert send(queue_of(pending("mine"), is_one_of_many=True), view) == [("mine", "other")]


def test_a_wish_for_a_replica_that_has_become_busy_counts_where_it_would_go_now() -> None:
    """The other gateway has not heard of it yet, or not looked: its request will take the room wanted here."""
    view = view_of(wanted=make_stats(num_waiting_tokens=2000), other=make_stats(num_waiting_tokens=200))
    view.set_wishes("wanted", [Wish((0, 0, 1.5), 11, 160)])
    assert send(queue_of(pending("mine"), is_one_of_many=True), view) == []
    cached_there = view_of(wanted=make_stats(num_waiting_tokens=900), other=make_stats(num_waiting_tokens=200))
    cached_there.set_wishes("wanted", [Wish((0, 0, 1.5), 1, 16, 9)])  # what is cached there is worth waiting for
    assert send(queue_of(pending("mine"), is_one_of_many=True), cached_there) == [("mine", "other")]


def test_an_overdue_wish_and_one_for_a_replica_that_has_left_hold_nobody_up() -> None:
    view = view_of(only=make_stats(num_waiting_tokens=200), gone=make_stats())
    view.set_wishes("only", [Wish((0, 0, 1.5), 10, 160)])
    view.set_wishes("gone", [Wish((0, 0, 1.5), 10, 160)])
    view.leave("gone")
    assert [placed.place for placed in view.wishes(0.0)] == [0]
    queue = queue_of(pending("mine"), is_one_of_many=True)
    assert send(queue, view, now=1.0) == []
    assert send(queue, view, now=1.6) == [("mine", "only")]


def test_whoever_is_alone_does_not_wait_for_a_turn() -> None:
    view, rng = view_of(only=make_stats()), Random(0)
    queue = queue_of(pending("one"), is_one_of_many=True)
    assert queue.turn(view, 8, 0.0, rng) == 0
    decoding, busy = (view_of(only=stats) for stats in (make_stats(num_running=9, num_waiting_tokens=9), BUSY))
    turns, longer = ([queue.turn(seen, 8, 0.0, rng) for _ in range(50)] for seen in (decoding, busy))
    assert min(turns) > 0, "others may come in this moment"
    assert max(turns) < 0.25 * 2.4 * 8 <= 0.75 * 2.4 * 8 < min(longer)
    decoding.set_wishes("only", [Wish((0, 0, 99.0), 1, 1)])
    assert min(queue.turn(decoding, 8, 0.0, rng) for _ in range(50)) > 0.75 * 2.4 * 8, "others wait for it as well"
    view.set_wishes("only", [Wish((0, 0, 1.5), 10, 160)])
    assert queue.turn(view, 8, 0.0, rng) > 0
    assert queue.turn(view, 1, 0.0, rng) == 0


def test_who_has_less_time_left_looks_sooner() -> None:
    """Both gateways draw the same number."""
    queues = [queue_of(pending("one", arrival_s=arrival_s), is_one_of_many=True) for arrival_s in (-2.0, 0.0)]
    urgent, patient = (queue.turn(view_of(only=BUSY), 2, 0.0, Random(0)) for queue in queues)
    assert urgent < patient


def test_who_goes_first_by_its_share_goes_first_at_the_replica_too() -> None:
    """The light tenant's request is due later than the heavy one's: told these dates, the replica would let the heavy
    one pass. All can be in time.
    """
    queue = queue_of(*[pending(f"heavy{i}", 2500, tenant="heavy") for i in range(3)])
    view = view_of(one=make_stats(num_total_blocks=2000, num_free_blocks=2000, token_s=0.00036))
    sent = [queue.next(view, WEIGHTS, 0.0, Random(0)) for _ in range(2)]
    queue.push(pending("light", 700, tenant="light", arrival_s=1.4))
    sent += [queue.next(view, WEIGHTS, 1.4, Random(0)) for _ in range(2)]
    tenants = [dispatch.pending.tenant for dispatch in sent if dispatch is not None]
    assert tenants == ["heavy", "heavy", "light", "heavy"]
    dues = [dispatch.due_s for dispatch in sent if dispatch is not None]
    assert dues[:3] == pytest.approx([3.8, 3.8, 3.904])
    assert dues[3] > dues[2]


def test_who_waits_goes_before_what_yields_once_another_tenant_was_served() -> None:
    """By its second service, one tenant has had far more than the other: its requests yield."""
    weights = RouteWeights(decode_price=0.0)
    view = view_of(busy=BUSY, later=make_stats(num_waiting_tokens=500, due_tokens=(*[0] * 5, 500, 500)))
    queue = queue_of(pending("before", tenant="second"), config=HoldConfig())
    assert queue.next(view_of(gone=make_stats()), weights, 0.0, Random(0)) is not None
    queue.push(pending("first", 640, tenant="first"))
    queue.push(pending("second", arrival_s=0.5, tenant="second"))
    sent = queue.next(view, weights, 0.5, Random(0))
    assert sent is not None
    assert (sent.pending.tenant, sent.decision.best) == ("second", "later")
    view.reserve("second", "later", 10, 160)
    sent = queue.next(view, weights, 0.5, Random(0))
    assert sent is not None
    assert (sent.pending.tenant, sent.decision.best) == ("first", "later")


def test_what_is_to_wait_for_a_replica_that_stalls_is_planned_elsewhere_and_back() -> None:
    view = view_of(busy=structs.replace(BUSY, num_waiting_tokens=600), next=BUSY)
    queue = queue_of(pending("waits", 640), config=HoldConfig())

    def planned_at() -> list[str]:
        assert queue.next(view, WEIGHTS, 1.0, Random(0)) is None
        return [place.replica_id for place in queue.up_to("waits", 1.0, 100)[0]]

    assert planned_at() == ["next"]
    view.set_stalled("next", True)
    assert planned_at() == ["busy"]
    view.set_stalled("next", False)
    assert planned_at() == ["next"]


def test_a_replica_that_joins_takes_what_the_last_look_left() -> None:
    view, queue = view_of(a=make_stats(num_free_blocks=5)), queue_of(pending("r0"), pending("r1"))
    assert send(queue, view) == []
    view.join("b")
    view.apply_snapshot("b", make_stats(), (), 0.01)
    assert send(queue, view, 0.01) == [("r0", "b"), ("r1", "b")]


def test_where_nothing_can_start_it_is_still_planned_where_each_is_to_wait() -> None:
    view, queue = view_of(full=make_stats(num_free_blocks=0)), queue_of(pending("r0"), pending("r1"))
    assert send(queue, view) == []
    assert [place.replica_id for place in queue.up_to("r1", 0.0, 100)[0]] == ["full", "full"]


def test_what_a_look_finds_cached_is_not_to_be_computed() -> None:
    view = view_of(one=make_stats(num_free_blocks=1))
    queue = queue_of(*[pending(f"r{i}", hashes=PREFIX[:10]) for i in range(2)])
    assert send(queue, view) == []
    assert queue.num_tokens == 2 * 160
    view.apply_update("one", None, PREFIX[:5], (), 0.1)
    assert send(queue, view, 0.6) == []
    assert queue.num_tokens == 2 * (160 - 5 * 16)


def test_the_most_urgent_goes_where_its_prompt_is_cached_since_a_moment_ago() -> None:
    """Both wait for the replica that caches their prompt. Another one, that is idle, caches it since."""
    view = view_of(
        owner=make_stats(num_waiting_tokens=5000, num_total_blocks=300), idle=make_stats(num_total_blocks=300)
    )
    view.apply_update("owner", None, PREFIX, (), 0.0)
    queue = queue_of(*[pending(name, 1601, hashes=PREFIX) for name in ("first", "second")])
    assert send(queue, view) == []
    view.apply_update("idle", None, PREFIX, (), 0.01)
    assert send(queue, view, now=MAX_FIRST_MATCH_AGE_S + 0.01)[:1] == [("first", "idle")]


def test_a_request_that_no_look_comes_to_has_less_to_compute_once_its_prompt_is_cached() -> None:
    """Each look ends with the urgent request that it sends."""
    view, queue, now = (
        view_of(one=make_stats()),
        queue_of(*[pending(f"late{i}", 1601, hashes=PREFIX) for i in range(5)]),
        0.0,
    )
    for held in tuple(queue):
        queue.remove(held.query.request_id)
        queue.push(replace(held, priority=1))
    for number in range(60):
        now = 0.05 * number
        if number == 20:
            assert queue.num_tokens == 5 * 1601
            view.apply_update("one", None, PREFIX, (), now)
        view.apply_update("one", make_stats(), (), (), now)
        queue.push(pending(f"urgent{number}", 256, arrival_s=now))
        sent = queue.next(view, WEIGHTS, now, Random(0))
        assert sent is not None
        assert sent.pending.query.request_id == f"urgent{number}"
    assert queue.num_tokens == 5


def test_the_sizes_of_thousands_are_looked_up_less_often() -> None:
    """A replica that can start something keeps looks going; nothing that is held fits into it now."""
    count = 3 * MOST_SIZES
    view = view_of(one=make_stats(num_free_blocks=1))
    queue = queue_of(*[pending(str(number), 1601, hashes=PREFIX) for number in range(count)])
    assert queue.next(view, WEIGHTS, 0.0, Random(0)) is None
    view.apply_update("one", None, PREFIX, (), 0.5)
    known = [0]
    for tenth in range(1, 70):
        assert queue.next(view, WEIGHTS, 0.1 * tenth, Random(0)) is None
        known.append((count * 1601 - queue.num_tokens) // 1600)
    assert known[45] - known[35] == pytest.approx(MOST_SIZES, rel=0.25)
    assert known[-1] == count
