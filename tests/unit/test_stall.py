"""A replica whose step does not end."""

from __future__ import annotations

import numpy as np
import pytest
from fixtures.cluster_views import make_row, make_stats

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.stall import Progress, stalled

PACE = {
    "token_s": 0.01,
    "step_s": 0.4,
    "max_num_batched_tokens": 256,
    "num_running": 1,
}  # the longest step takes 2.96 s
OTHER = make_row("b", make_stats(token_s=0.01))


@pytest.mark.parametrize(
    ("quiet_s", "changes", "has_stalled"),
    [
        (11.0, {}, False),
        (12.0, {}, True),
        (12.0, {"token_s": 0.0}, False),  # nobody knows how long its steps are
        (0.9, {"token_s": 1e-6, "step_s": 0.0}, False),
        (1.1, {"token_s": 1e-6, "step_s": 0.0}, True),
        (60.0, {"num_running": 0}, False),  # it is idle
    ],
)
def test_a_step_that_takes_several_times_the_longest_has_stalled(
    quiet_s: float, changes: dict[str, float], has_stalled: bool
) -> None:
    candidates = Candidates.of([make_row("a", make_stats(**(PACE | changes))), OTHER])
    assert stalled(candidates, np.array([quiet_s, 0.0])).tolist() == [has_stalled, False]


def test_nobody_has_stalled_where_nobody_else_could_take_what_waits() -> None:
    row = make_row("a", make_stats(**PACE))
    assert not stalled(Candidates.of([row]), np.array([60.0])).any()
    draining = make_row("b", make_stats(token_s=0.01, draining=True))
    assert not stalled(Candidates.of([row, draining]), np.array([60.0, 0.0])).any()
    assert not stalled(Candidates.of([row, make_row("b", make_stats(**PACE))]), np.array([60.0, 60.0])).any()


def test_progress_is_a_step_that_ends_or_having_nothing_to_do() -> None:
    begun = Progress(0.0, 0.0, True).after(make_stats(num_running=1, busy_s=2.0), 5.0)
    assert begun == Progress(2.0, 5.0, False)
    assert begun.after(make_stats(num_running=1, num_waiting=3, busy_s=2.0), 6.0) is begun
    assert begun.after(make_stats(num_waiting=1, busy_s=2.5), 6.0) == Progress(2.5, 6.0, False)
    idle = begun.after(make_stats(busy_s=2.0), 6.0)
    assert idle == Progress(2.0, 6.0, True)
    assert idle.after(make_stats(num_waiting=1, busy_s=2.0), 7.0) == Progress(2.0, 7.0, False), "its step begins now"
