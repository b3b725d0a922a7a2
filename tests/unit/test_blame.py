"""Which rank is blamed when none makes progress, judged by their last pulses."""

from __future__ import annotations

import pytest

from shoal_replica.ranks.blame import stuck_ranks
from shoal_replica.ranks.channel import Pulse

STEP = 7
DONE = Pulse(STEP, 9)
WAITING = Pulse(STEP, 3, 0, True)


def receiving(rank: int) -> Pulse:
    return Pulse(STEP, 1, 0, True, rank)


def sending(rank: int) -> Pulse:
    return Pulse(STEP, 9, 0, True, rank)


@pytest.mark.parametrize(
    ("pulses", "stuck"),
    [
        pytest.param([WAITING, Pulse(STEP, 2, 0, True)], [1], id="behind its peer"),
        pytest.param([WAITING, Pulse(STEP - 1, 9)], [1], id="has not begun"),
        pytest.param([WAITING, Pulse(STEP - 1, 9, 0, True)], [1], id="in the step before"),
        pytest.param([WAITING, WAITING], [0, 1], id="both in one collective"),
        pytest.param([DONE, WAITING], [1], id="its peer is done"),
        pytest.param([DONE, DONE], [0, 1], id="all are done and no answer came"),
    ],
)
def test_who_of_a_stage_is_stuck(pulses: list[Pulse], stuck: list[int]) -> None:
    assert stuck_ranks(pulses, STEP, tensor_size=2) == stuck


@pytest.mark.parametrize(
    ("pulses", "stuck"),
    [
        pytest.param(
            [Pulse(STEP, 80, 0, True), Pulse(STEP, 79, 0, True), receiving(0), receiving(1)], [1], id="first stage"
        ),
        pytest.param([DONE, Pulse(STEP, 8, 0, True), WAITING, receiving(1)], [1], id="one rank has handed over"),
        pytest.param([sending(2), sending(3), Pulse(STEP, 3, 0, True), Pulse(STEP, 2, 0, True)], [3], id="last stage"),
        pytest.param([DONE, DONE, Pulse(STEP - 1, 2), receiving(1)], [2, 3], id="not begun, and a lost hand-over"),
        pytest.param([sending(2), DONE, receiving(0), WAITING], [0, 2, 3], id="a hand-over that stands still"),
    ],
)
def test_who_of_two_stages_is_stuck(pulses: list[Pulse], stuck: list[int]) -> None:
    assert stuck_ranks(pulses, STEP, tensor_size=2) == stuck
