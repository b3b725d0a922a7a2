"""The log of the last decisions, bounded in memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.admission import NOTHING_QUEUED, Admission, AdmissionLimits, AdmissionRecord
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.look import Considered, Look
from shoal_cluster.policies.route_query import BYTES_PER_PASSED
from shoal_cluster.policies.route_record import RouteRecord, decide
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import route_log
from shoal_cluster.serve.explanation import Refusal
from shoal_cluster.serve.route_log import BYTES_PER_HASH, BYTES_PER_STATS, MAX_BEHIND, MAX_RECORDS_PER_REQUEST, RouteLog

CANDIDATES = Candidates.of([make_row("a"), make_row("b")])
QUERY = make_query()
PASSING = replace(QUERY, passed=(("a", 10), ("b", 20)))


def record(request_id: str, passed: tuple[tuple[str, int], ...]) -> RouteRecord:
    query = replace(QUERY, request_id=request_id, passed=passed)
    return decide(query, CANDIDATES, RouteWeights(), seed=0, time_s=0.0)


def test_what_requests_pass_counts_as_memory_of_records_and_looks() -> None:
    log = RouteLog()
    log.add(record("one", ()))
    log.trim()
    before = log.num_bytes - 2 * BYTES_PER_STATS
    log.add(record("other", PASSING.passed))
    log.trim()
    assert log.num_bytes == 2 * BYTES_PER_STATS + 2 * before + 2 * BYTES_PER_PASSED
    matched = np.zeros(2, np.int64)
    seen = Considered(QUERY, 0.0, matched), Considered(PASSING, 0.0, matched)
    look = Look(CANDIDATES, RouteWeights(), 1.0, 0.0, False, seen, {}, ())
    assert look.num_bytes == 3 * matched.nbytes + 2 * BYTES_PER_PASSED


def test_records_that_pass_many_push_out_older_ones() -> None:
    passed = tuple((f"replica-{number}", number) for number in range(1000))
    log = RouteLog(max_bytes=250 * 1000)
    for number in range(5):
        log.add(record(f"call{number}", passed))
    assert len(log) == 5
    log.trim()
    assert len(log) == 2
    assert log.of_call("call4")
    assert not log.of_call("call2")


def test_what_replicas_have_said_since_the_last_record_counts_as_its_memory() -> None:
    """Compared with what the process allocates, with 64 replicas that all report between any two decisions."""
    tracemalloc.start()
    log, max_bytes = RouteLog(max_bytes=2**22), 2**22
    for number in range(300):
        told = [make_stats(time_s=number + place / 64, token_s=1e-4 * (number + place)) for place in range(64)]
        rows = [make_row(f"{place:02}", stats) for place, stats in enumerate(told)]
        log.add(decide(make_query(request_id=f"call{number}"), Candidates.of(rows), RouteWeights(), seed=0, time_s=0.0))
    log.trim()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max_bytes / 2 < log.num_bytes <= max_bytes
    assert taken < 2 * max_bytes


def test_nobody_has_to_trim() -> None:
    log = RouteLog(max_requests=10)
    look = Look(CANDIDATES, RouteWeights(), 1.0, 0.0, False, (), {}, ())
    for number in range(1000):
        log.add_look(f"call{number}", look)
        log.add(record(f"call{number}", ()))
        assert len(log) <= 10 + MAX_BEHIND
    assert log.of_call("call999")
    assert log.look_of("call900") is None
    assert log.look_of("call999") is look


def test_looks_go_with_their_records() -> None:
    log = RouteLog(max_bytes=1)
    look = Look(CANDIDATES, RouteWeights(), 1.0, 0.0, False, (), {}, ())
    for request_id in ("old", "old#2", "new"):
        log.add_look(request_id, look)
        log.add(record(request_id, ()))
    log.trim()
    assert [log.look_of(request_id) for request_id in ("old", "old#2", "new")] == [None, None, look]


def test_a_look_stays_while_a_record_of_its_request_does() -> None:
    log, look = RouteLog(), Look(CANDIDATES, RouteWeights(), 1.0, 0.0, False, (), {}, ())
    log.add_look("call", look)
    for _ in range(MAX_RECORDS_PER_REQUEST + 5):
        log.add(record("call", ()))
    assert log.look_of("call") is look


def test_the_latest_records_come_first_and_their_calls_stay_longest() -> None:
    log = RouteLog(max_requests=1)
    for number, request_id in enumerate(("old", "new", "old#2")):
        log.add(record(request_id, ())._replace(time_s=float(number)))
    assert [kept.query.request_id for kept in log.recent(9)] == ["old#2", "new", "old"]
    log.trim()
    assert not log.of_call("new")
    assert len(log.of_call("old")) == 2


def test_a_refusal_among_calls_of_which_nothing_is_kept_is_found() -> None:
    log = RouteLog()
    log.refuse(Refusal(1.0, "call-3#0", "full", 1.0, ()))
    assert [refusal.request_id for refusal in log.of_request("call").refusals] == ["call-3#0"]


def test_refusals_with_records_take_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RouteLog()
    full = AdmissionRecord(QUERY, CANDIDATES, AdmissionLimits(), NOTHING_QUEUED, Admission(False, "full", 1.0))
    one = BYTES_PER_HASH * len(QUERY.block_hashes) + CANDIDATES.num_bytes
    monkeypatch.setattr(route_log, "MAX_REFUSAL_BYTES", 3 * one)
    monkeypatch.setattr(route_log, "BYTES_PER_STATS", 0)
    for number in (0, 1, 2, 3, 4, 4):
        log.refuse(Refusal(float(number), f"call{number}", "full", 1.0, (), full))
    log.refuse(Refusal(5.0, "call5", "given up", 0.0, ()))
    assert [number for number in range(6) if log.refusal_of(f"call{number}")] == [2, 3, 4, 5]


def test_the_last_refusals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_log, "MAX_REFUSALS", 3)
    log = RouteLog()
    for number in range(5):
        log.refuse(Refusal(float(number), f"call{number}#1", "full", 1.0, ()))
    log.refuse(Refusal(9.0, "call2", "full again", 1.0, ()))
    kept = {number: [r.time_s for r in log.of_request(f"call{number}").refusals] for number in range(5)}
    assert kept == {0: [], 1: [], 2: [9.0], 3: [3.0], 4: [4.0]}
