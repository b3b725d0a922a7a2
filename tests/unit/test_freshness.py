"""Which writers are up to date, by their own clock or by the reader's."""

from __future__ import annotations

import pytest

from shoal_cluster.serve.freshness import Freshness

UNIX_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("age_s", "expected"), [(0.0, True), (5.0, True), (5.1, False), (-4.9, True), (-3600.0, False)]
)
def test_by_its_writers_clock(age_s: float, expected: bool) -> None:
    assert ("g" in Freshness(5.0).look({"g": UNIX_S - age_s}, UNIX_S, 0.0)) is expected


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_of_a_writer_whose_clock_differs_by_the_readers(off_s: float) -> None:
    freshness, off_unix_s = Freshness(5.0), UNIX_S + off_s
    seen = []
    for now_s, written_s in ((0.0, 0.0), (1.0, 1.0), (5.9, 1.0), (6.1, 1.0), (7.0, 2.0), (8.0, 1.0), (12.1, 1.0)):
        seen.append("g" in freshness.look({"g": off_unix_s + written_s, "h": UNIX_S + now_s}, UNIX_S + now_s, now_s))
    assert seen == [False, True, True, False, True, True, False]


def test_one_that_was_ahead_and_has_stopped_is_not_fresh_when_its_time_comes() -> None:
    freshness, ahead_s = Freshness(5.0), 1800.0
    for now_s in (0.0, 1.0, 10.0, ahead_s - 1, ahead_s, ahead_s + 1):
        assert "g" not in freshness.look({"g": UNIX_S + ahead_s}, UNIX_S + now_s, now_s)
    assert "g" in freshness.look({"g": UNIX_S + ahead_s + 1}, UNIX_S + ahead_s + 2, ahead_s + 2), "it goes on"


def test_who_writes_no_more_is_forgotten() -> None:
    freshness, behind_s = Freshness(5.0), UNIX_S - 3600
    freshness.look({"g": behind_s}, UNIX_S, 0.0)
    assert freshness.look({}, UNIX_S, 0.5) == frozenset()
    assert freshness.look({"g": behind_s + 1}, UNIX_S, 1.0) == frozenset(), "nothing is known of an earlier time"
