"""How fast a replica computes prompts, as measured by its steps."""

from __future__ import annotations

import pytest

from shoal_replica.executor import ScheduledSequence
from shoal_replica.prefill_pace import FORGET_S, MIN_FULL_STEPS, UNKNOWN_PACE, WINDOW_S, PrefillPace

FULL = 1024


def chunk(num_tokens: int, num_before: int = 0) -> ScheduledSequence:
    return ScheduledSequence(0, num_before, num_tokens, samples=False)


def full(pace: PrefillPace, token_s: float, now: float, count: int = 1) -> float:
    """Take ``count`` full steps; returns the pace of full steps as reported then."""
    for _ in range(count):
        pace.take([chunk(FULL)], 0, FULL * token_s, now)
    return pace.told(now).full_token_s


def test_nothing_is_known_before_a_step_of_prompts() -> None:
    pace = PrefillPace(FULL)
    assert pace.told(0.0) == UNKNOWN_PACE
    pace.take([chunk(1, 500)] * 100, 0, 0.1, 0.0)
    pace.take([chunk(63)], 0, 0.1, 0.0)
    pace.take([ScheduledSequence(0, 0, FULL, False, 64)], 0, 0.1, 0.0)  # most of it may be logits
    assert pace.told(0.0) == UNKNOWN_PACE


def test_the_mean_is_of_all_steps_that_are_mostly_prompts() -> None:
    pace = PrefillPace(FULL)
    pace.take([chunk(100)], 0, 0.1, 0.0)
    assert pace.told(0.0).token_s == pytest.approx(1e-3)
    pace.take([chunk(90)], 10, 0.2, 0.0)
    assert pace.told(0.0).token_s == pytest.approx(0.8 * 1e-3 + 0.2 * 2e-3)
    assert pace.told(0.0).full_token_s == 0.0


def test_the_fastest_is_told_after_some_full_steps() -> None:
    pace = PrefillPace(FULL)
    assert full(pace, 9e-3, 0.0, MIN_FULL_STEPS - 1) == 0.0, "the first do once what is done once"
    assert full(pace, 1e-3, 0.0) == pytest.approx(1e-3)
    assert full(pace, 2e-3, 1.0) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("scheduled", "num_decodes", "counts"),
    [
        ([chunk(FULL * 9 // 10 + 1)], 0, True),
        ([chunk(FULL * 9 // 10)], 0, False),  # fewer tokens share a step's constant time
        ([chunk(FULL * 9 // 10)], 1, True),
        ([chunk(FULL, FULL)], 0, True),
        ([chunk(FULL, FULL + 1)], 0, False),  # its tokens have more context than that
        ([chunk(FULL // 2), chunk(FULL // 2, 2 * FULL)], 0, True),
        ([chunk(FULL)], FULL // 6, False),  # too many of its tokens are decodes
    ],
)
def test_full_steps_are_alike(scheduled: list[ScheduledSequence], num_decodes: int, counts: bool) -> None:
    pace = PrefillPace(FULL)
    full(pace, 1.0, 0.0, MIN_FULL_STEPS)
    pace.take(scheduled, num_decodes, 1e-3, 0.0)
    assert (pace.told(0.0).full_token_s < 1.0) is counts


def test_the_fastest_of_one_to_two_windows_is_told() -> None:
    pace = PrefillPace(FULL)
    full(pace, 1e-3, 0.0, MIN_FULL_STEPS)
    assert full(pace, 3e-3, WINDOW_S + 1.0) == pytest.approx(1e-3)
    assert full(pace, 4e-3, 2 * WINDOW_S) == pytest.approx(1e-3)
    assert full(pace, 5e-3, 2 * WINDOW_S + 2.0) == pytest.approx(3e-3)


def test_it_is_forgotten_when_no_step_was_full_for_long() -> None:
    pace = PrefillPace(FULL)
    full(pace, 1e-3, 0.0, MIN_FULL_STEPS)
    assert pace.told(FORGET_S).full_token_s == pytest.approx(1e-3)
    pace.take([chunk(FULL // 4)], 0, 1.0, FORGET_S)
    assert pace.told(FORGET_S + 1.0).full_token_s == 0.0
    assert pace.told(FORGET_S + 1.0).token_s > 0
    assert full(pace, 3e-3, FORGET_S + 2.0, MIN_FULL_STEPS - 1) == 0.0, "it begins anew"
    assert full(pace, 4e-3, FORGET_S + 2.0) == pytest.approx(3e-3)
