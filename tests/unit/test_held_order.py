"""The order of held requests, checked against sorting them anew."""

from __future__ import annotations

import math
from random import Random

import pytest
from fixtures.cluster_views import make_query

from shoal_cluster.policies.held import Held
from shoal_cluster.policies.held_order import HeldOrder
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.tenants import FairShares

NUM_CONSIDERED = 5
LATER_S = 8.0


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_the_order_is_that_of_sorting_anew(num_tenants: int) -> None:
    rng, shares = Random(num_tenants), FairShares()
    order, here = HeldOrder(shares, NUM_CONSIDERED, LATER_S), []
    for number in range(600):
        now = number * 0.1
        event = rng.random() if here else 0.0
        if event < 0.4:
            tenant, priority = f"tenant-{rng.randrange(num_tenants)}", int(rng.random() < 0.1)
            held = Held(PendingRequest(query=make_query(10), arrival_s=now, tenant=tenant, priority=priority))
            here.append(held)
            shares.enter(tenant, now)
        elif event < 0.6:
            held = here.pop(rng.randrange(len(here)))
            order.remove(held)
            shares.leave(held.pending.tenant)
        elif event < 0.8:
            held = rng.choice(here)
        else:
            shares.charge(rng.choice(here).pending.tenant, rng.randrange(5000), now)
        if event < 0.4 or 0.6 <= event < 0.8:
            held.due_s, held.takes_s = now + rng.randrange(20), rng.choice([0.5, 2.0])
            held.length_s = 1.0
            held.num_new_tokens = rng.randrange(1, 100)
            order.put(held)
            if rng.random() < 0.3:  # its due date stays the same
                held.num_new_tokens = rng.randrange(1, 100)
                order.put(held)
        if here:
            its = rng.choice(here)
            before = [one for one in here if (order.rank(one), here.index(one)) < (order.rank(its), here.index(its))]
            assert order.before(its, its.due_s) == (sum(one.num_new_tokens for one in before), len(before))
            after = [one for one in here if one is not its and order.rank(one)[:2] <= order.rank(its)[:2]]
            assert order.before(its, math.inf)[1] == len(after)
            assert [order.rank(one) for one in reversed(order)] == sorted(map(order.rank, here), reverse=True)
            assert sorted(map(order.rank, order.first(3))) == sorted(map(order.rank, here))[:3]
        ranked = sorted(here, key=order.rank)
        considered = order.to_consider()
        assert [one.due_s for one, _ in considered] == [one.due_s for one in ranked[:NUM_CONSIDERED]]
        assert sorted(map(order.rank, here))[:NUM_CONSIDERED] == [order.rank(one) for one, _ in considered]
        begins_s = [one.due_s - one.takes_s for one in here]
        assert order.begins_by_s == min(begins_s, default=math.inf)
        late = order.that_begin_by(now + 5.0)
        assert len(late) == sum(begin_s <= now + 5.0 for begin_s in begins_s)
        for number_after, (one, due_s) in enumerate(considered, 1):
            if shares.had_more(one.pending.tenant):
                assert due_s == one.due_s + LATER_S
            else:
                assert due_s <= min([one.due_s, *(other_s for _, other_s in considered[number_after:])])


def test_the_same_list_until_something_in_it_changes() -> None:
    order = HeldOrder(FairShares(), NUM_CONSIDERED, LATER_S)
    here = [Held(PendingRequest(query=make_query(10), arrival_s=0.0), due_s=float(due)) for due in range(8)]
    for held in here:
        order.put(held)
    before = order.to_consider()
    order.put(here[1])
    order.remove(here[7])
    assert order.to_consider() is before
    here[2].due_s = 9.0
    order.put(here[2])
    assert [held for held, _ in order.to_consider()] == [here[number] for number in (0, 1, 3, 4, 5)]


@pytest.mark.parametrize("num_before", [NUM_CONSIDERED - 1, NUM_CONSIDERED, NUM_CONSIDERED + 1])
def test_a_newcomer_is_considered_behind_any_number_of_restricted_requests(num_before: int) -> None:
    """However many were held when the list was last made."""
    order = HeldOrder(FairShares(), NUM_CONSIDERED, LATER_S)
    order.tell_apart(100)
    for due in range(num_before):
        query = make_query(10, excluded=frozenset({"replica"}))
        order.put(Held(PendingRequest(query=query, arrival_s=0.0), due_s=float(due)))
    assert len(order.to_consider()) == min(num_before, NUM_CONSIDERED)
    newcomer = Held(PendingRequest(query=make_query(10), arrival_s=0.0), due_s=99.0)
    order.put(newcomer)
    assert newcomer in [held for held, _ in order.to_consider()]


def test_requests_that_must_not_go_elsewhere_are_considered_behind_those_that_must_not_go_here() -> None:
    order = HeldOrder(FairShares(), NUM_CONSIDERED, LATER_S)
    order.tell_apart(100)
    for due in range(2 * NUM_CONSIDERED):
        query = make_query(10, excluded=frozenset({"idle"}))
        order.put(Held(PendingRequest(query=query, arrival_s=0.0), due_s=float(due)))
    other = Held(PendingRequest(query=make_query(10, excluded=frozenset({"busy"})), arrival_s=0.0), due_s=99.0)
    order.put(other)
    assert other in [held for held, _ in order.to_consider()]


def test_requests_that_may_go_anywhere_are_considered_behind_two_kinds_that_may_not() -> None:
    order = HeldOrder(FairShares(), NUM_CONSIDERED, LATER_S)
    order.tell_apart(100)
    for due in range(3 * NUM_CONSIDERED):
        excluded = frozenset({"idle"} if due < NUM_CONSIDERED else {"idle", "other"})
        order.put(Held(PendingRequest(query=make_query(10, excluded=excluded), arrival_s=0.0), due_s=float(due)))
    free = Held(PendingRequest(query=make_query(10), arrival_s=0.0), due_s=99.0)
    order.put(free)
    considered = [held for held, _ in order.to_consider()]
    assert free in considered
    assert [held.due_s for held in considered] == sorted(held.due_s for held in considered)


def test_all_dates_change_at_once() -> None:
    rng, shares = Random(0), FairShares()
    order, moved = HeldOrder(shares, NUM_CONSIDERED, LATER_S), HeldOrder(shares, NUM_CONSIDERED, LATER_S)
    here, there = ([Held(PendingRequest(query=make_query(10), arrival_s=0.0)) for _ in range(20)] for _ in range(2))
    for one, other in zip(here, there, strict=True):
        order.put(one)
        moved.put(other)
    for one, other in zip(here, there, strict=True):
        one.due_s = other.due_s = float(rng.randrange(10))
        one.takes_s = other.takes_s = rng.random()
        one.num_new_tokens = other.num_new_tokens = rng.randrange(100)
        order.put(one)
    moved.move_all()
    assert [there.index(held) for held in moved] == [here.index(held) for held in order]
    assert [due_s for _, due_s in moved.to_consider()] == [due_s for _, due_s in order.to_consider()]
    assert moved.begins_by_s == order.begins_by_s
    assert len(moved.that_begin_by(5.0)) == len(order.that_begin_by(5.0))
    assert moved.before(there[7], 6.5) == order.before(here[7], 6.5)
