"""Quantiles and attainment of a sliding window, checked against sorted lists of its contents."""

from __future__ import annotations

import math
from random import Random

import pytest

from shoal_cluster.serve.call_times import CallTimes
from shoal_cluster.serve.latency_window import NUM_SLICES, LatencyTargets, LatencyWindow

OBJECTIVE = LatencyTargets(ttft_s=1.0, inter_token_s=0.1)
TOLERANCE = 0.02  # half a bucket


def exact(times: list[float], share: float) -> float:
    return sorted(times)[math.ceil(share * len(times)) - 1]


def test_quantiles_are_those_of_the_sorted_times() -> None:
    rng = Random(3)
    ttft = [rng.lognormvariate(-1.5, 1.0) for _ in range(999)]
    gaps = [rng.lognormvariate(-4.0, 0.7) for _ in range(5000)]
    window = LatencyWindow(OBJECTIVE)
    for seconds in ttft:
        window.add_first_token(seconds, 100.0)
    for seconds in gaps:
        window.add_tokens(seconds, 1, 100.0)
    summary = window.summary(100.0)
    for times, quantiles in ((ttft, summary.ttft), (gaps, summary.inter_token)):
        assert quantiles is not None
        assert quantiles.num == len(times)
        assert quantiles.p50_s == pytest.approx(exact(times, 0.5), rel=TOLERANCE)
        assert quantiles.p95_s == pytest.approx(exact(times, 0.95), rel=TOLERANCE)
        assert quantiles.p99_s == pytest.approx(exact(times, 0.99), rel=TOLERANCE)


def test_one_time_is_every_quantile() -> None:
    window = LatencyWindow(OBJECTIVE)
    window.add_first_token(0.5, 0.0)
    quantiles = window.summary(0.0).ttft
    assert quantiles is not None
    assert (quantiles.p50_s, quantiles.p99_s) == pytest.approx((0.5, 0.5), rel=TOLERANCE)


def test_a_chunk_counts_its_tokens() -> None:
    window = LatencyWindow(OBJECTIVE)
    window.add_tokens(0.01, 9, 0.0)
    window.add_tokens(1.0, 1, 0.0)
    quantiles = window.summary(0.0).inter_token
    assert quantiles is not None
    assert quantiles.num == 10
    assert quantiles.p50_s == pytest.approx(0.01, rel=TOLERANCE)
    assert quantiles.p95_s == pytest.approx(1.0, rel=TOLERANCE)


def test_nothing_is_known_of_nothing() -> None:
    summary = LatencyWindow(OBJECTIVE).summary(5.0)
    assert (summary.ttft, summary.inter_token, summary.attainment) == (None, None, None)


def test_old_times_leave_the_window() -> None:
    """Checked against a list of times: everything counted is younger than the window, and everything younger than the
    window less one slice is counted."""
    rng = Random(5)
    window = LatencyWindow(OBJECTIVE, window_s=60.0)
    slice_s = 60.0 / NUM_SLICES
    seen: list[float] = []
    now = 1000.0
    for _ in range(3000):
        now += rng.expovariate(5.0) if rng.random() > 0.01 else rng.uniform(0, 100)
        seen.append(now)
        window.add_request(True, now)
        num = window.summary(now).num_requests
        assert sum(when > now - 60.0 + slice_s for when in seen) <= num <= sum(when > now - 60.0 for when in seen)
    assert window.summary(now + 61.0).num_requests == 0
    assert len(window._slices) <= NUM_SLICES


@pytest.mark.parametrize(
    ("ttft_s", "inter_token_s", "met"),
    [(0.5, 0.05, True), (1.0, 0.1, True), (1.1, 0.05, False), (0.5, 0.2, False), (None, 0.0, False)],
)
def test_attainment_is_the_share_that_met_both_limits(ttft_s: float | None, inter_token_s: float, met: bool) -> None:
    assert OBJECTIVE.is_met(ttft_s, inter_token_s) is met
    window = LatencyWindow(OBJECTIVE)
    window.add_request(OBJECTIVE.is_met(ttft_s, inter_token_s), 0.0)
    window.add_request(True, 0.0)
    assert window.summary(1.0).attainment == (1.0 if met else 0.5)


def test_times_beyond_all_measure_are_counted() -> None:
    window = LatencyWindow(OBJECTIVE)
    for seconds in (0.0, -1.0, 1e-9, 1e9):
        window.add_first_token(seconds, 0.0)
    quantiles = window.summary(0.0).ttft
    assert quantiles is not None
    assert quantiles.num == 4
    assert quantiles.p99_s == pytest.approx(1e9, rel=TOLERANCE)


def test_a_call_times_its_tokens() -> None:
    window = LatencyWindow(OBJECTIVE)
    times = CallTimes(10.0, 2, window)
    assert (times.ttft_s, times.inter_token_s) == (None, 0.0)
    for index, num_tokens, now in [(0, 0, 10.2), (0, 1, 10.5), (1, 1, 10.6), (0, 2, 10.7), (1, 1, 11.1)]:
        times.take(index, num_tokens, now)
    assert times.ttft_s == pytest.approx(0.5)
    assert times.inter_token_s == pytest.approx((0.2 + 0.5) / 3)
    summary = window.summary(11.1)
    assert summary.ttft is not None
    assert summary.inter_token is not None
    assert (summary.ttft.num, summary.inter_token.num) == (1, 3)
    assert summary.inter_token.p50_s == pytest.approx(0.1, rel=TOLERANCE)
    assert summary.inter_token.p99_s == pytest.approx(0.5, rel=TOLERANCE)
