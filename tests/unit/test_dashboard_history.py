"""The dashboard's sample store and its rates: bounded, in order, true to what was added."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec import structs

from shoal_cluster.serve.dashboard.history import FINE_S, History, Sample
from shoal_cluster.serve.dashboard.meter import WINDOW_S, Meter
from shoal_cluster.serve.dashboard.replica_pasts import recalled
from shoal_cluster.serve.dashboard.roster import roster
from shoal_cluster.serve.past_sample import PAST_BUCKET_S, PAST_S, PastSample
from shoal_cluster.serve.rows import ClusterRow, ReplicaRow
from shoal_replica.stats import ReplicaStats

START_S = 1_700_000_000.0
STATS = ReplicaStats(
    time_s=START_S,
    block_size=16,
    num_total_blocks=100,
    num_free_blocks=75,
    num_allocated_blocks=25,
    num_cached_blocks=10,
    num_running=2,
    num_waiting=1,
    num_waiting_tokens=7,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def sample(time_s: float, tokens_per_s: float = 0.0, utilization: float = 0.0, num_ready: float = 2) -> Sample:
    return Sample(
        time_s=time_s,
        requests_per_s=1.0,
        tokens_per_s=tokens_per_s,
        utilization=utilization,
        waiting_tokens=0.0,
        num_wanted=2.0,
        num_ready=num_ready,
    )


def filled(num_seconds: int) -> History:
    history = History()
    for i in range(num_seconds):
        history.add(sample(START_S + i, tokens_per_s=float(i % 20), utilization=0.9 if i % 20 == 7 else 0.1))
    return history


def test_every_second_of_the_last_ten_minutes_is_kept_as_it_was() -> None:
    history = filled(2000)
    last = START_S + 1999
    fine = history.since(last - FINE_S)
    assert [s.time_s for s in fine] == [last - FINE_S + i for i in range(1, int(FINE_S) + 1)]
    assert fine[-1] == history.latest == sample(last, tokens_per_s=19.0, utilization=0.1)


def test_older_samples_become_means_and_peaks_of_twenty_seconds() -> None:
    history = filled(2000)
    older = [s for s in history.since(0) if s.time_s <= START_S + 1999 - FINE_S]
    whole = older[1:-1]
    assert {b.time_s - a.time_s for a, b in pairwise(whole)} == {PAST_BUCKET_S}
    assert all(s.tokens_per_s == pytest.approx(9.5) for s in whole), "rates keep their mean"
    assert all(s.utilization == 0.9 for s in whole), "loads keep their peak"


def test_a_lost_replica_is_not_averaged_away() -> None:
    history = History()
    for i in range(int(FINE_S) + 60):
        history.add(sample(START_S + i, num_ready=1 if i == 25 else 2))
    assert min(s.num_ready for s in history.since(0)) == 1
    assert sum(s.num_ready == 1 for s in history.since(0)) == 1


def test_the_store_is_bounded_over_a_day() -> None:
    history = filled(24 * 3600)
    assert len(history) <= FINE_S + PAST_S / PAST_BUCKET_S + 2
    kept = history.since(0)
    assert len(kept) == len(history)
    times = [s.time_s for s in kept]
    assert times == sorted(set(times))
    assert times[-1] - times[0] == pytest.approx(PAST_S, abs=2 * PAST_BUCKET_S)


def test_a_clock_set_back_adds_nothing() -> None:
    history = filled(10)
    history.add(sample(START_S + 3, tokens_per_s=1e9))
    assert [s.time_s for s in history.since(0)] == [START_S + i for i in range(10)]


def test_what_was_not_known_does_not_count_when_samples_merge() -> None:
    history = History()
    for i in range(int(FINE_S) + 60):
        history.add(replace_sample(START_S + i, ttft_p95_s=3.0 if i == 23 else None))
    older = [s for s in history.since(0) if s.time_s <= START_S + 59]
    assert [s.ttft_p95_s for s in older] == [None, 3.0, None]
    assert {s.attainment for s in older} == {None}


def replace_sample(time_s: float, ttft_p95_s: float | None) -> Sample:
    return Sample(time_s=time_s, ttft_p95_s=ttft_p95_s)


def test_what_the_replicas_remember_comes_before_the_first_sample() -> None:
    begin_s = START_S // PAST_BUCKET_S * PAST_BUCKET_S
    history = filled(30)
    pasts = [[past(begin_s + PAST_BUCKET_S * n, 50) for n in range(-100, 5)], [past(begin_s - PAST_BUCKET_S, 10)]]
    for told in (pasts[:1], pasts, pasts):  # replicas answer one after another
        history.recall(recalled(told))
    kept = history.since(0)
    assert [s.time_s for s in kept] == sorted({s.time_s for s in kept})
    assert [s.tokens_per_s for s in kept[:100]] == [4.0] * 99 + [8.0]
    assert (kept[99].num_ready, kept[99].utilization, kept[99].ttft_p50_s) == (2, 0.3, None)
    assert [s.time_s for s in kept[-30:]] == [START_S + i for i in range(30)]


def test_what_is_remembered_is_bounded_too() -> None:
    history = History()
    history.recall(recalled([[past(START_S + PAST_BUCKET_S * n, 50) for n in range(5000)]]))
    assert len(history) == PAST_S / PAST_BUCKET_S


def past(time_s: float, num_allocated_blocks: int) -> PastSample:
    return PastSample(
        time_s=time_s,
        tokens_per_s=4.0,
        num_allocated_blocks=num_allocated_blocks,
        num_total_blocks=100,
        num_waiting=1,
        num_waiting_tokens=7,
    )


def test_an_empty_history_has_no_samples() -> None:
    assert History().latest is None
    assert History().since(0) == []


def cluster(num_requests: int, **tokens: int) -> ClusterRow:
    rows = tuple(
        ReplicaRow(replica_id=i, stats=structs.replace(STATS, num_generated_tokens=n), connected=True)
        for i, n in tokens.items()
    )
    return ClusterRow(model="m", replicas=(*rows, ReplicaRow(replica_id="silent")), num_requests=num_requests)


def observe(meter: Meter, seen: ClusterRow, now: float, time_s: float) -> Sample | None:
    return meter.observe(seen, roster(seen.replicas, None), 3, now, time_s)


def test_the_first_look_has_no_rates() -> None:
    meter = Meter()
    assert meter.rates() is None
    assert observe(meter, cluster(5, a=100), 10.0, START_S) is None
    assert meter.rates() is None


def test_rates_are_differences_over_time() -> None:
    meter = Meter()
    observe(meter, cluster(5, a=100, b=7), 10.0, START_S)
    seen = observe(meter, cluster(9, a=150, b=7), 12.0, START_S + 2)
    assert seen == Sample(
        time_s=START_S + 2,
        requests_per_s=2.0,
        tokens_per_s=25.0,
        utilization=0.25,
        hit_rate=None,
        num_waiting=2,
        waiting_tokens=14,
        num_wanted=3,
        num_ready=2,
        num_starting=0,
        num_draining=0,
    )
    rates = meter.rates()
    assert rates is not None
    assert rates.tokens_per_s_of == {"a": 25.0, "b": 0.0}


def test_replicas_that_come_and_go_make_no_spikes() -> None:
    meter = Meter()
    observe(meter, cluster(0, a=1_000_000), 0.0, START_S)
    seen = observe(meter, cluster(0, b=1_000_000), 1.0, START_S + 1)
    assert seen is not None
    assert seen.tokens_per_s == 0.0


def test_rates_forget_what_is_older_than_the_window() -> None:
    meter = Meter()
    for second in range(100):
        observe(meter, cluster(second if second < 50 else 50, a=0), float(second), START_S + second)
    rates = meter.rates()
    assert rates is not None
    assert rates.requests_per_s == 0.0, f"nothing came for longer than {WINDOW_S} s"


def test_the_hit_rate_is_that_of_the_last_minute() -> None:
    meter = Meter()
    for second in range(200):
        warm = second >= 100
        stats = structs.replace(
            STATS, num_prompt_tokens=100 * second, num_cached_tokens=75 * (second - 100) if warm else 0
        )
        row = ReplicaRow(replica_id="a", stats=stats, connected=True)
        observe(meter, ClusterRow(model="m", replicas=(row,)), float(second), START_S + second)
        if second == 50:
            assert meter.hit_rate() == 0.0
    assert meter.hit_rate() == 0.75
