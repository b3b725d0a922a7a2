"""Plans over many replicas: natively as by numpy, and what may still be started as counted replica by replica."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies import plan as plan_module
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, URGENT
from shoal_cluster.policies.considered import Considered
from shoal_cluster.policies.outlook import Outlook
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.wishes import PlacedWish, Wish
from shoal_replica.stats import DUE_WITHIN_S

STEP = 256
NOW = 50.0


def row(rng: Random, place: int) -> ReplicaView:
    """A replica that has not reported, takes no requests, has nothing to compute, or about one or two steps of work."""
    kind = rng.randrange(10)
    if kind == 4:
        return make_row(f"replica-{place:04}", make_stats(num_free_blocks=rng.choice([100, 30, 0])))
    num_tokens = rng.choice([0, STEP - 1, STEP, STEP + 1, 2 * STEP - 1, 2 * STEP, rng.randrange(3 * STEP)])
    due = sorted(rng.randint(0, num_tokens) for _ in DUE_WITHIN_S[1:])
    stats = make_stats(
        num_total_blocks=rng.choice([100, 100, 60]),
        num_free_blocks=rng.choice([60, 40, 12, 0]),
        num_running=rng.randrange(9),
        max_num_batched_tokens=STEP,
        num_waiting=int(num_tokens > 0),
        num_waiting_tokens=num_tokens,
        due_tokens=(*due, num_tokens),
        by_due=rng.random() < 0.5,
        draining=kind == 1,
        step_s=rng.choice([0.0, 0.02, 0.3]),
    )
    return make_row(
        f"replica-{place:04}",
        None if kind == 0 else stats,
        connected=kind != 2,
        stalled=kind == 3,
        slowness=rng.choice([1.0, 1.0, 1.41, 4.0]),
        num_reserved=rng.randrange(3),
        num_reserved_blocks=rng.randrange(20),
        num_reserved_tokens=rng.randrange(300),
    )


def request(rng: Random, replica_ids: tuple[str, ...], number: int) -> Considered:
    """A prompt, at times for other replicas than it had before, before waiting tokens, or behind other gateways'."""
    count = len(replica_ids)
    query = make_query(
        rng.choice([rng.randint(1, 60), rng.randint(200, 900), rng.randint(1000, 2000)]),
        request_id=str(number),
        decode_steps=rng.choice([1, 32, 128]),
        excluded=frozenset(rng.sample(replica_ids, rng.randint(1, count)) if rng.random() < 0.1 else ()),
        passed=tuple((name, rng.randrange(200)) for name in rng.sample(replica_ids, count // 2))
        if rng.random() < 0.2
        else (),
    )
    wishes = [
        Wish((0, 0, 1.0), rng.randint(1, 30), rng.randint(1, 400), rng.randrange(9), rng.choice([1, 128]))
        for _ in range(rng.choice([0, 0, 0, 1, 3]))
    ]
    most = query.num_prompt_tokens // 16
    matched = np.array([rng.choice([0, 0, rng.randint(0, most)]) for _ in replica_ids], np.int64)
    if rng.random() < 0.4 and matched.any():
        query = replace(query, num_known_blocks=int(matched.max()), num_alike=rng.choice([2, 4, 3, 64]))
        query = replace(query, num_holders=rng.randrange(4)).with_blocks_given(
            rng.choice([0, 0, int(matched.max()), 9])
        )
    before = tuple(PlacedWish(wish, rng.randrange(count)) for wish in wishes)
    due_s, objective_s = (NOW + rng.choice([-1.0, 0.5, 1.0, 3.0, 20.0, 99.0]) for _ in range(2))
    return Considered(query, due_s, matched, before, objective_s)


@pytest.mark.parametrize("num_replicas", [1, 2, 7, 8, 40, 333])
@pytest.mark.parametrize("seed", range(12))
def test_natively_a_plan_is_the_same(monkeypatch: pytest.MonkeyPatch, seed: int, num_replicas: int) -> None:
    """Whenever a request may start, the plan goes on behind it, as if it had been given to its replica after all."""
    rng = Random(f"{seed} {num_replicas}")
    told = Candidates.of([row(rng, place) for place in range(num_replicas)])
    snapshot = Candidates(
        told.replica_ids,
        told.node_ids,
        told.stats,
        told.states,
        told.columns,
        NOW,
        told.updated_s + NOW,
        told.num_matched_blocks,
    )
    assert plan_module.library is not None
    weights = RouteWeights(prefill_price=rng.choice([1.0, 6.5]), decode_price=rng.choice([0.0, 70.0, 640.0]))
    considered = [request(rng, snapshot.replica_ids, number) for number in range(40)]
    limits = rng.choice([0.5, 1.0, 2.5]), rng.choice([0.0, 0.0, 100.0, 1000.0])
    natively = Plan(snapshot, weights, *limits)
    monkeypatch.setattr(plan_module, "library", None)
    by_numpy = Plan(snapshot, weights, *limits)
    plans_all, number, before = rng.random() < 0.5, 0, snapshot.columns.copy()
    while number < len(considered):
        steps, may_start = natively.until_startable(considered[number:], plans_all)
        assert by_numpy.until_startable(considered[number:], plans_all) == (steps, may_start)
        number += len(steps)
        if may_start:
            place = rng.randrange(num_replicas)
            for plan in (natively, by_numpy):
                plan.give(considered[number].query, place, considered[number].matched.item(place))
            number += 1
        np.testing.assert_array_equal(natively.seen_by_next(snapshot).columns, by_numpy.seen_by_next(snapshot).columns)
        assert natively.outlook(1e-4) == by_numpy.outlook(1e-4)
        if not (may_start or number == len(considered)):
            assert not plans_all
            assert natively.outlook(0.0).num_startable == 0
            break
    np.testing.assert_array_equal(snapshot.columns, before)


@pytest.mark.parametrize("num_replicas", [1, 8, 60])
@pytest.mark.parametrize("seed", range(5))
def test_the_outlook_is_that_of_the_replicas_one_by_one(seed: int, num_replicas: int) -> None:
    rng, token_s, max_steps_ahead = Random(f"{seed} {num_replicas}"), 1e-3, 1.5
    snapshot = Candidates.of([row(rng, place) for place in range(num_replicas)])
    waits_s, capacities, num_idle = [], [], 0
    for place, stats in enumerate(snapshot.stats):
        capacity, urgent, tokens = snapshot.columns[(CAPACITY, URGENT, LOAD), place].tolist()
        if capacity < 0 or stats is None:
            continue
        capacities.append(capacity)
        num_idle += tokens == 0
        if urgent <= max_steps_ahead * STEP + (STEP - 1 if stats.by_due else 0):
            waits_s.append(urgent * token_s + (stats.step_s if stats.num_running else 0.0))
    most_room = max(-1, int(snapshot.columns[ROOM].max()))
    expected = Outlook(len(waits_s), num_idle, min(capacities, default=0), most_room, min(waits_s, default=0.0))
    assert Plan(snapshot, RouteWeights(), max_steps_ahead).outlook(token_s) == expected


def test_a_match_of_other_replicas_is_refused() -> None:
    """Natively it would be read beyond its end."""
    snapshot = Candidates.of([make_row("a"), make_row("b")])
    other = Considered(make_query(), math.inf, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="must be of 2 replicas"):
        Plan(snapshot, RouteWeights(), 1.0).until_startable([other], True)


def test_a_look_leaves_what_others_see_as_it_was() -> None:
    snapshot = Candidates.of([make_row("a"), make_row("b", stats=make_stats(num_waiting_tokens=900))])
    plan = Plan(snapshot, RouteWeights(), 1.0)
    assert plan.seen_by_next(snapshot) is snapshot
    plan.give(make_query(), 0, 0)
    seen = plan.seen_by_next(snapshot)
    plan.give(make_query(), 0, 0)
    assert (snapshot.num_reserved.tolist(), seen.num_reserved.tolist()) == ([0, 0], [1, 0])


def test_who_takes_an_idle_replica_depends_on_what_others_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request's cheapest replica is the first one's, too. When that is dearer by the first one, another is
    the cheapest, and takes no longer than the request is patient.
    """
    rows = [
        make_row(name, make_stats(num_total_blocks=1000, num_free_blocks=900, num_waiting_tokens=load))
        for name, load in (("p", 1700), ("q", 600), ("x", 0))
    ]
    snapshot = Candidates.of(rows)
    first = Considered(make_query(1600, request_id="1"), NOW, np.array([30, 0, 0]), (), snapshot.now + 999.0)
    second = Considered(make_query(1600, request_id="2"), NOW, np.array([90, 75, 0]), (), snapshot.now + 8.0)
    weights = RouteWeights(decode_price=0.0)
    natively = Plan(snapshot, weights, 1.0, 100.0).until_startable([first, second], True)
    monkeypatch.setattr(plan_module, "library", None)
    assert Plan(snapshot, weights, 1.0, 100.0).until_startable([first, second], True) == natively
    assert natively[0][:2] == [(0, 30), (1, 75)]
