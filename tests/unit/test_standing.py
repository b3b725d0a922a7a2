"""What a look has decided stands until something can change it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_row, make_stats
from msgspec import structs

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.pending import HoldConfig, PendingQueue, PendingRequest
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import ReplicaStats

WEIGHTS = RouteWeights(decode_price=0.0)
BUSY = make_stats(num_waiting_tokens=300)  # more than a step of 256: it can start nothing now


def view_of(**stats: ReplicaStats) -> ClusterView:
    view = ClusterView()
    for replica_id, its_stats in stats.items():
        view.join(replica_id)
        view.apply_snapshot(replica_id, its_stats, (), 0.0)
    return view


def pending(request_id: str, num_tokens: int, arrival_s: float = 0.0, tenant: str = "") -> PendingRequest:
    """A request of ``tenant``, by default of a tenant of its own."""
    query = make_query(num_tokens, request_id=request_id)
    return PendingRequest(query=query, arrival_s=arrival_s, tenant=tenant or request_id)


def look(queue: PendingQueue, view: ClusterView, now: float) -> Dispatch | None:
    return queue.next(view, WEIGHTS, now, Random(0))


def test_who_waits_goes_before_what_yields_once_another_tenant_was_served() -> None:
    """By its second service, one tenant has had far more than the other: its requests yield."""
    view = view_of(busy=BUSY, later=make_stats(num_waiting_tokens=500, due_tokens=(*[0] * 5, 500, 500)))
    queue = PendingQueue(HoldConfig())
    queue.push(pending("before", 160, tenant="second"))
    assert look(queue, view_of(gone=make_stats()), 0.0) is not None
    queue.push(pending("first", 640))
    queue.push(pending("second", 160, arrival_s=0.5))
    sent = look(queue, view, 0.5)
    assert sent is not None
    assert (sent.pending.tenant, sent.replica_id) == ("second", "later")
    view.reserve("second", "later", 10, 160, 0.5)
    sent = look(queue, view, 0.5)
    assert sent is not None
    assert (sent.pending.tenant, sent.replica_id) == ("first", "later")


def test_what_is_to_wait_for_a_replica_that_stalls_is_planned_elsewhere_and_back() -> None:
    view = view_of(busy=structs.replace(BUSY, num_waiting_tokens=600), next=BUSY)
    queue = PendingQueue(HoldConfig())
    queue.push(pending("waits", 640))

    def planned_at() -> list[str]:
        assert look(queue, view, 1.0) is None
        return [view.replica_ids[planned.step.place] for planned in queue._standing.planned]

    assert planned_at() == ["next"]
    view.set_stalled("next", True)
    assert planned_at() == ["busy"]
    view.set_stalled("next", False)
    assert planned_at() == ["next"]


@pytest.mark.parametrize("num_kept", [0, 1, 2, 4])
@pytest.mark.parametrize("changed", [(), (0,), (1, 2)])
def test_a_plan_kept_in_part_is_one_of_that_part_alone(num_kept: int, changed: tuple[int, ...]) -> None:
    """Requests are given to the replicas in turn, which then have more to do and less room."""
    rows = [
        make_row(name, stats=structs.replace(BUSY, num_waiting_tokens=200 * place)) for place, name in enumerate("abc")
    ]
    plan = Plan(Candidates.of(rows), WEIGHTS, max_steps_ahead=1.0)
    matched = np.zeros(len(rows), np.int64)

    def give(plan: Plan, count: int) -> None:
        for number in range(count):
            plan.give(make_query(160), number % len(rows), matched, due_s=2.0)

    give(plan, 4)
    assert plan.num_startable == 0
    for place in changed:
        rows[place] = replace(
            rows[place], stats=structs.replace(BUSY, num_free_blocks=50 - place, num_allocated_blocks=50 + place)
        )
    snapshot = Candidates.of(rows)
    plan.keep(snapshot, changed, num_kept)
    assert len(plan.given) == num_kept if not changed else len(plan.given) <= num_kept
    again = Plan(snapshot, WEIGHTS, max_steps_ahead=1.0)
    give(again, len(plan.given))
    assert plan.seen_by_next(snapshot) == again.seen_by_next(snapshot)
    assert (plan.num_startable, plan.num_open) == (again.num_startable, again.num_open)
    assert plan.is_untouched == again.is_untouched


def test_what_is_promised_to_a_slow_replica_counts_as_many_times() -> None:
    """Requests that are priced already get the prices that they would have if priced now."""
    rows = [make_row("a", slowness=4.0), make_row("b"), make_row("c", slowness=1.41)]
    plan = Plan(Candidates.of(rows), RouteWeights(), max_steps_ahead=1.0)
    queries, matched = [make_query(160), make_query(900)], np.zeros((2, 3), np.int64)
    plan.consider(queries, matched)
    for place in (0, 1, 2, 0):
        plan.set_aside(place, 10, 160)
    costs = plan._costs.copy()
    plan.consider(queries, matched)
    assert costs == pytest.approx(plan._costs)


def test_what_is_given_again_is_taken_back_with_the_rest() -> None:
    """It is counted in when it is next needed, but the plan is no longer untouched."""
    cluster = Candidates.of([make_row("a"), make_row("b")])
    plan = Plan(cluster, RouteWeights(), max_steps_ahead=1.0)
    plan.give(make_query(), 1, np.zeros(2, np.int64), due_s=9.0)
    (given,) = plan.take_back(0)
    assert plan.is_untouched
    plan.give_again(given)
    assert not plan.is_untouched
    assert plan.keep(cluster, (), 0) == [given]
    assert plan.is_untouched
