"""Routing: a table of cases for the terms of the cost, and what must hold for every query."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from fixtures.cluster_views import make_query, make_row, make_stats
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shoal_cluster.policies.baselines import ROUTINGS, place
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.memory import Recollection
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import decide
from shoal_cluster.policies.routing import RouteWeights, route
from shoal_replica.errors import ConfigError, Unavailable
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.testing import make_request, make_scheduler

WEIGHTS = RouteWeights()
BLOCK = 16
WORTH_OF_5 = int(WEIGHTS.prefill_price * 5 * BLOCK)


def decision_of(query: RouteQuery, *rows: ReplicaView, seed: int = 0, weights: RouteWeights = WEIGHTS) -> RouteDecision:
    return route(query, Candidates.of(rows), weights, Random(seed))


def test_a_query_has_the_hashes_that_the_replica_stores() -> None:
    """Whatever separates a request's cached prefixes: its salt, and its adapter."""
    for changes in ({}, {"cache_salt": "s"}, {"adapter": "a"}, {"cache_salt": "s", "adapter": "a"}):
        request = make_request("r", range(40), max_tokens=1, **changes)
        scheduler, executor = make_scheduler(block_size=4, adapters=("a",))
        scheduler.add(request)
        while (step := scheduler.schedule(0.0)) is not None:
            scheduler.update(step, executor.execute(step))
        assert set(RouteQuery.for_request(request, 4).block_hashes) == set(scheduler.kv.cached_hashes())


def test_a_replica_without_the_adapter_leaves_the_request_to_others() -> None:
    """While replicas are replaced, one may lack what another has: the client has done nothing wrong."""
    scheduler, _ = make_scheduler(adapters=("a",))
    with pytest.raises(Unavailable, match="adapter 'b' is not loaded here"):
        scheduler.add(make_request(adapter="b"))
    assert not scheduler.has_work


def test_a_short_answer_stays_where_its_prompt_is_cached_and_a_long_one_may_not() -> None:
    """Seven sequences cost a request that decodes beside them for long 4480 tokens, and one of 16 steps 560."""
    num_matched_blocks = int(3000 / WEIGHTS.prefill_price / BLOCK)  # worth 3000 tokens
    crowded = make_row("a", num_matched_blocks=num_matched_blocks, stats=make_stats(num_running=7))
    long = make_query(801)
    assert decision_of(long, crowded, make_row("b")).ranked[0] == "b"
    assert decision_of(replace(long, decode_steps=16), crowded, make_row("b")).ranked[0] == "a"


@pytest.mark.parametrize(
    ("term", "better", "worse"),
    [
        ("waiting tokens", {}, {"stats": make_stats(num_waiting_tokens=50)}),
        ("reserved tokens", {}, {"num_reserved_tokens": 50}),
        ("cached prefix", {"num_matched_blocks": 3}, {"num_matched_blocks": 2}),
        ("running sequences", {"stats": make_stats(num_running=1)}, {"stats": make_stats(num_running=2)}),
        ("sequences on their way", {}, {"num_reserved": 1}),
        ("slowness", {"slowness": 1.41}, {"slowness": 2.0}),
        ("free blocks barrier", {}, {"stats": make_stats(num_free_blocks=10)}),
        ("reserved blocks barrier", {"num_reserved_blocks": 89}, {"num_reserved_blocks": 90}),
        ("slots barrier", {}, {"num_reserved": 8}),
        (
            "queue's blocks barrier",
            {"stats": make_stats(num_waiting=1, num_waiting_tokens=89 * 16)},
            {"stats": make_stats(num_waiting=1, num_waiting_tokens=89 * 16 + 1)},
        ),
        (
            "a full replica comes after one with more work",
            {"stats": make_stats(num_waiting_tokens=10_000)},
            {"num_matched_blocks": 1, "stats": make_stats(num_free_blocks=0)},
        ),
        (
            "cached blocks count as room",
            {"num_matched_blocks": 10, "stats": make_stats(num_free_blocks=1)},
            {"num_matched_blocks": 9, "stats": make_stats(num_free_blocks=1)},
        ),
        (
            "a hit is worth its price in queue",
            {"num_matched_blocks": 5, "stats": make_stats(num_waiting_tokens=WORTH_OF_5 - 1)},
            {},
        ),
        (
            "a longer queue outweighs the hit",
            {},
            {"num_matched_blocks": 5, "stats": make_stats(num_waiting_tokens=WORTH_OF_5 + 1)},
        ),
    ],
)
def test_each_term(term: str, better: dict[str, Any], worse: dict[str, Any]) -> None:
    """Whatever the replicas' ids and the seed that breaks ties."""
    for seed in range(5):
        for first, second in (("a", "b"), ("b", "a")):
            decision = decision_of(make_query(160), make_row(first, **better), make_row(second, **worse), seed=seed)
            assert decision.ranked == (first, second), term


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"connected": False}, "not connected"),
        ({"stats": make_stats(draining=True)}, "draining"),
        ({"stats": make_stats(num_total_blocks=10)}, "needs 11 blocks, has 10"),
    ],
)
def test_the_filter_names_its_reason(changes: dict[str, Any], why: str) -> None:
    decision = decision_of(make_query(160), make_row("bad", **changes))
    assert decision.ranked == ()
    assert decision.candidates[0].rejected == why
    assert why in decision.reason


def test_a_replica_without_stats_is_not_eligible() -> None:
    decision = decision_of(make_query(), ReplicaView(replica_id="new", connected=True))
    assert (decision.ranked, decision.candidates[0].rejected) == ((), "no stats yet")


def test_excluded_replicas_are_left_out() -> None:
    decision = decision_of(make_query(excluded=frozenset({"a"})), make_row("a"), make_row("b"))
    assert decision.ranked == ("b",)
    assert decision_of(make_query(excluded=frozenset({"a"})), make_row("a")).ranked == ()


def test_no_replica_at_all() -> None:
    assert decision_of(make_query()).reason == "no replica is known"


def test_the_reason_tells_hits_barrier_and_stale_stats() -> None:
    hashes = tuple(hash_blocks(range(160), 16))
    fresh = make_row("fresh", num_matched_blocks=4)
    stale = make_row("stale", age_s=4.0)
    reason = decision_of(make_query(160, block_hashes=hashes), fresh, stale).reason
    assert reason.startswith("fresh: least cost")
    assert reason.endswith("4 of 10 prompt blocks cached")
    assert "stale stats: stale (4.0 s)" in reason
    owner = make_row("owner", num_matched_blocks=9, stats=make_stats(num_free_blocks=0))
    reason = decision_of(make_query(160, block_hashes=hashes), fresh, owner).reason
    assert reason.endswith("4 of 10 prompt blocks cached, 9 at owner")
    full = make_row("full", stats=make_stats(num_free_blocks=0))
    assert "none can start it now" in decision_of(make_query(), full).reason
    busy = make_row("busy", stats=make_stats(num_waiting_tokens=10_000))
    assert "cheaper ones have no room now" in decision_of(make_query(), full, busy).reason


def test_terms_add_up_to_the_score() -> None:
    row = make_row(stats=make_stats(num_running=3, num_waiting_tokens=70), num_reserved_tokens=5, num_matched_blocks=2)
    (candidate,) = decision_of(make_query(), row).candidates
    costs = [value for name, value in candidate.terms if not name.endswith(("_blocks", "_slots"))]
    assert candidate.score == pytest.approx(sum(costs))
    assert candidate.score == pytest.approx(75 + WEIGHTS.prefill_price * 128 + WEIGHTS.decode_price * 3)


def test_what_others_pay_is_never_more_than_what_is_computed() -> None:
    """Also where blocks come with the request: they are known, and cost nothing anywhere."""
    hashes = tuple(hash_blocks(range(1600), 16))
    large = make_stats(num_total_blocks=1000)
    asked = make_query(1690, block_hashes=hashes, num_known_blocks=100, num_alike=16, num_holders=1)
    for query, spared in ((asked, 1600), (asked.with_blocks_given(60), 729), (asked.with_blocks_given(100), 89)):
        decision = decision_of(query, make_row("warm", large, num_matched_blocks=100), make_row("cold", large))
        cost = {candidate.replica_id: dict(candidate.terms)["prefill"] for candidate in decision.candidates}
        uncached = query.num_prompt_tokens
        warm = max(1, uncached - 1600)
        assert cost["warm"] == WEIGHTS.prefill_price * warm
        assert cost["cold"] == WEIGHTS.prefill_price * (uncached - (uncached - warm) * (1 - 2 / 16))
        assert uncached - warm == spared
        assert decision.reason.endswith("at least 16 wait for the first 100, cached by 1")
    assert "wait for" not in decision_of(asked.anew(), make_row("cold", large)).reason


def test_a_slower_replica_costs_its_compute_so_many_times_and_what_is_displaced_once() -> None:
    stats = make_stats(num_running=3, num_waiting_tokens=70)
    (candidate,) = decision_of(make_query(), make_row(stats=stats, slowness=2.83)).candidates
    compute = 70 + 160 + WEIGHTS.decode_price * 3
    assert dict(candidate.terms)["slower"] == pytest.approx(1.83 * compute)
    assert candidate.score == pytest.approx(2.83 * compute + (WEIGHTS.prefill_price - 1) * 160)
    assert candidate.score == pytest.approx(sum(v for name, v in candidate.terms if not name.startswith(("m", "free"))))
    idle, busy = make_row("idle", slowness=2.0), make_row("busy", stats=make_stats(num_waiting_tokens=170))
    assert decision_of(make_query(), idle, busy).ranked[0] == "idle", "it takes 160 twice, the other 330"
    assert decision_of(make_query(), replace(idle, slowness=2.83), busy).ranked[0] == "busy"


def test_equals_are_spread_evenly() -> None:
    rows = [make_row(name) for name in "abcd"]
    first = Counter(decision_of(make_query(), *rows, seed=seed).ranked[0] for seed in range(2000))
    assert all(400 < first[name] < 600 for name in "abcd")


def test_reserving_what_was_placed_spreads_a_burst() -> None:
    rows = {name: make_row(name) for name in "abcd"}
    for number in range(40):
        best = decision_of(make_query(64), *rows.values(), seed=number).ranked[0]
        rows[best] = replace(rows[best], num_reserved_tokens=rows[best].num_reserved_tokens + 64)
    assert {row.num_reserved_tokens for row in rows.values()} == {640}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_must_be_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ConfigError, match="prefill_price"):
        RouteWeights(prefill_price=value)


# Properties that hold for every query


@st.composite
def replica_rows(draw: st.DrawFn) -> list[ReplicaView]:
    rows = []
    for replica_id in draw(st.lists(st.sampled_from("abcdef"), max_size=6, unique=True)):
        total = draw(st.integers(5, 40))
        stats = make_stats(
            num_total_blocks=total,
            num_free_blocks=draw(st.integers(0, total)),
            num_running=draw(st.integers(0, 9)),
            num_waiting=draw(st.integers(0, 3)),
            num_waiting_tokens=draw(st.sampled_from((0, 10, 500))),
            draining=draw(st.booleans()),
        )
        rows.append(
            ReplicaView(
                replica_id=replica_id,
                stats=draw(st.sampled_from((stats, stats, stats, None))),
                age_s=draw(st.sampled_from((0.0, 0.5, 5.0))),
                connected=draw(st.sampled_from((True, True, False))),
                stalled=draw(st.sampled_from((False, False, True))),
                slowness=draw(st.sampled_from((1.0, 1.0, 1.41, 2.0))),
                num_reserved_blocks=draw(st.integers(0, 10)),
                num_reserved_tokens=draw(st.sampled_from((0, 30))),
                num_matched_blocks=draw(st.integers(0, 8)),
            )
        )
    return rows


queries = st.builds(
    make_query, st.integers(1, 400), excluded=st.frozensets(st.sampled_from("abcdef"), max_size=2).map(frozenset)
)
seeds = st.integers(0, 2**32)


@settings(max_examples=100)
@given(rows=replica_rows(), query=queries, seed=seeds)
def test_ranks_exactly_those_that_can_take_it(rows: list[ReplicaView], query: RouteQuery, seed: int) -> None:
    can = {
        r.replica_id
        for r in rows
        if r.connected
        and r.stats is not None
        and not (r.stalled or r.stats.draining)
        and r.stats.num_total_blocks >= query.num_blocks_needed
        and r.replica_id not in query.excluded
    }
    for routing in ROUTINGS:
        ranked = place(
            routing, query, Candidates.of(rows), WEIGHTS, Random(seed), Recollection.nothing(len(rows), seed)
        ).ranked
        assert len(ranked) == len(set(ranked))
        assert set(ranked) == can


@settings(max_examples=100)
@given(rows=replica_rows(), query=queries, seed=seeds)
def test_candidate_order_does_not_matter_and_records_replay(
    rows: list[ReplicaView], query: RouteQuery, seed: int
) -> None:
    record = decide(query, Candidates.of(rows), WEIGHTS, seed=seed, time_s=1.0)
    assert record.replay() == record.decision
    assert record.decision.num_ranked == len(record.decision.ranked)
    assert record.decision.best == (record.replay().ranked or ("",))[0]  # found without ranking the others
    shuffled = Random(seed).sample(rows, len(rows))
    assert decision_of(query, *shuffled, seed=seed) == record.decision


@settings(max_examples=100)
@given(rows=replica_rows(), query=queries, seed=seeds, data=st.data())
def test_more_free_blocks_never_rank_a_replica_lower(
    rows: list[ReplicaView], query: RouteQuery, seed: int, data: st.DataObject
) -> None:
    before = decision_of(query, *rows, seed=seed).ranked
    if not before:
        return
    chosen = data.draw(st.sampled_from(before))
    freed = []
    for row in rows:
        if row.replica_id == chosen and row.stats is not None:
            more = data.draw(st.integers(row.stats.num_free_blocks, row.stats.num_total_blocks))
            stats = structs.replace(
                row.stats, num_free_blocks=more, num_allocated_blocks=row.stats.num_total_blocks - more
            )
            row = replace(row, stats=stats)
        freed.append(row)
    after = decision_of(query, *freed, seed=seed).ranked
    assert after.index(chosen) <= before.index(chosen)
