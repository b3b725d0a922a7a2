"""Admission: which requests are admitted, which are told when to retry, and which can never fit."""

from __future__ import annotations

import math

import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.admission import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    NOTHING_QUEUED,
    AdmissionLimits,
    Queued,
    admit,
    keep,
    lateness_s,
    stay,
)
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.replica_view import ReplicaView

LIMITS = AdmissionLimits(max_waiting_tokens=1000, max_waiting_requests=10)


def full(replica_id: str = "full", tokens: int = 1512, step_s: float = 0.5) -> ReplicaView:
    return make_row(replica_id, stats=make_stats(num_waiting=2, num_waiting_tokens=tokens, step_s=step_s))


def test_one_queue_with_room_is_enough() -> None:
    admission = admit(make_query(), Candidates.of([full(), make_row("free")]), LIMITS)
    assert (admission.admitted, admission.retry_after_s) == (True, None)
    assert "free" in admission.reason


def test_sheds_when_every_queue_is_full() -> None:
    admission = admit(make_query(), Candidates.of([full("a"), full("b")]), LIMITS)
    assert not admission.admitted
    assert not admission.never_fits
    assert "every replica's queue is full" in admission.reason


@pytest.mark.parametrize(
    ("tokens", "admitted"),
    [(999, True), (1000, False)],
)
def test_the_limit_is_exact(tokens: int, admitted: bool) -> None:
    assert admit(make_query(), Candidates.of([full(tokens=tokens)]), LIMITS).admitted is admitted


def test_promises_count_as_queued() -> None:
    assert not admit(make_query(), Candidates.of([make_row(num_reserved_tokens=1000)]), LIMITS).admitted
    assert not admit(make_query(), Candidates.of([make_row(num_reserved=10)]), LIMITS).admitted
    assert admit(make_query(), Candidates.of([make_row(num_reserved=9, num_reserved_tokens=999)]), LIMITS).admitted


def test_what_is_held_counts_by_its_tokens_before_and_by_all_its_requests() -> None:
    rows = Candidates.of([make_row("a"), make_row("b")])
    assert admit(make_query(), rows, LIMITS, Queued(1998, 18)).admitted
    assert not admit(make_query(), rows, LIMITS, Queued(2000)).admitted
    assert not admit(make_query(), rows, LIMITS, Queued(num_requests=20)).admitted


def test_retry_after_is_the_excess_at_the_measured_pace() -> None:
    """513 tokens over the limit, computed at 256 tokens per step of 0.5 s."""
    admission = admit(make_query(), Candidates.of([full("slow", step_s=5.0), full("fast")]), LIMITS)
    assert admission.retry_after_s == pytest.approx(513 / 256 * 0.5)


def test_few_tokens_in_many_requests_take_as_long_as_the_requests_too_many() -> None:
    """11 of 20 have to go, at 0.2 s each."""
    row = make_row(stats=make_stats(num_waiting=20, num_waiting_tokens=400, token_s=0.01))
    assert admit(make_query(), Candidates.of([row]), LIMITS).retry_after_s == pytest.approx(11 * 0.2)


def test_who_is_last_may_retry_when_what_waits_was_promised_is_held_and_was_refused_is_done() -> None:
    stats = make_stats(num_waiting=10, num_waiting_tokens=100, token_s=0.01)
    rows = Candidates.of([make_row(stats=stats, num_reserved=1, num_reserved_tokens=200)])
    assert keep(make_query(), rows, LIMITS, Queued(50, 1, 25)).retry_after_s == pytest.approx(
        (100 + 200 + 50 + 25) * 0.01
    )


@pytest.mark.parametrize(("tokens", "expected"), [(1000, MIN_RETRY_S), (10**9, MAX_RETRY_S)])
def test_retry_after_is_bounded(tokens: int, expected: float) -> None:
    assert admit(make_query(), Candidates.of([full(tokens=tokens)]), LIMITS).retry_after_s == expected


def test_a_request_may_wait_while_one_replica_could_keep_both_its_dates() -> None:
    """Where its prompt is cached its objective is shorter; elsewhere its prefill takes longer than its deadline."""
    stats = make_stats(num_total_blocks=10_000, token_s=1 / 8000)
    rows = [make_row("cached", stats=stats, num_matched_blocks=2500), make_row("cold", stats=stats)]
    query, limits = make_query(40_000), AdmissionLimits(objective=LatencyObjective(ttft_s=0.5))
    candidates = Candidates.of(rows)
    for waited_s in (0.1, 0.4, 0.6, 3.0, 6.0):
        for deadline_in_s in (math.inf, 30.0, 4.5, 0.001):
            late_s = lateness_s(query, candidates, limits, waited_s, deadline_in_s)
            answer = stay(query, candidates, limits, waited_s, NOTHING_QUEUED, deadline_in_s)
            assert answer.admitted == (late_s <= 0)
    assert "its objective is lost" in stay(query, candidates, limits, 6.0).reason
    assert "its deadline is lost" in stay(query, candidates, limits, 0.1, NOTHING_QUEUED, 0.0001).reason
    assert "its objective or its deadline is lost" in stay(query, candidates, limits, 0.6, NOTHING_QUEUED, 4.5).reason


def test_nobody_is_late_while_the_pace_of_a_replica_is_unknown() -> None:
    rows = [make_row(name, stats=make_stats(token_s=token_s)) for name, token_s in (("known", 0.001), ("unknown", 0.0))]
    limits = AdmissionLimits(objective=LatencyObjective(ttft_s=0.5))
    assert lateness_s(make_query(), Candidates.of(rows), limits, 100.0) == -math.inf
    assert lateness_s(make_query(), Candidates.of(rows[:1]), limits, 100.0) > 0


def test_a_long_prompt_is_due_later_by_the_time_that_its_pairs_take() -> None:
    """Its objective is twice its own prefill and 0.5 s."""
    row = make_row(stats=make_stats(num_total_blocks=10_000, token_s=1 / 8000))
    limits = AdmissionLimits(objective=LatencyObjective(ttft_s=0.5, prefill_factor=2.0), pair_s=1e-8)
    alone_s = PrefillTime(tokens_per_s=8000.0, pair_s=1e-8).seconds(0, 40_000)
    late_s = lateness_s(make_query(40_000), Candidates.of([row]), limits, 0.0)
    assert late_s == pytest.approx(5.0 - (0.5 + 2.0 * alone_s))


def test_too_large_for_any_replica_never_fits() -> None:
    rows = [make_row("small", stats=make_stats(num_total_blocks=5)), make_row("large")]
    admission = admit(make_query(1600), Candidates.of(rows), LIMITS)
    assert (admission.admitted, admission.never_fits, admission.retry_after_s) == (False, True, None)
    assert "101 blocks" in admission.reason
    assert "100" in admission.reason
    assert admit(make_query(1599), Candidates.of(rows), LIMITS).admitted
    silent = ReplicaView(replica_id="silent", connected=True)
    assert not admit(make_query(1600), Candidates.of([*rows, silent]), LIMITS).never_fits, "it may be larger"


def test_a_queue_it_cannot_use_does_not_count() -> None:
    small = make_row("small", stats=make_stats(num_total_blocks=5))
    assert not admit(make_query(160), Candidates.of([small, full()]), LIMITS).admitted


def test_a_late_one_may_retry_no_later_because_a_replica_has_just_joined() -> None:
    limits = AdmissionLimits(objective=LatencyObjective(ttft_s=0.1))
    busy, new = make_row("busy", stats=make_stats(token_s=0.001)), ReplicaView(replica_id="new", connected=True)
    alone, beside = (
        stay(make_query(), Candidates.of(rows), limits, 9.0, Queued(500)) for rows in ([busy], [busy, new])
    )
    assert alone.retry_after_s == beside.retry_after_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ReplicaView(replica_id="silent", connected=True)],
        [make_row("lost", connected=False)],
        [make_row("draining", stats=make_stats(draining=True))],
        [make_row("stalled", stalled=True)],
        [make_row("excluded")],
    ],
)
def test_nobody_to_take_it(rows: list[ReplicaView]) -> None:
    admission = admit(make_query(excluded=frozenset({"excluded"})), Candidates.of(rows), LIMITS)
    assert not admission.admitted
    assert not admission.never_fits
    assert admission.retry_after_s is not None
    assert admission.retry_after_s > 0
