"""What a replica says of the prompts before a newcomer, by when the newcomer is due."""

from __future__ import annotations

import pytest

from shoal_replica.stats import DUE_WITHIN_S
from shoal_replica.testing import make_request, make_scheduler


@pytest.mark.parametrize(
    ("policy", "expected"), [("deadline", (0, 0, 20, 20, 20, 20, 30)), ("fcfs", (30, 30, 30, 30, 30, 30, 30))]
)
def test_due_tokens_are_those_that_come_before(policy: str, expected: tuple[int, ...]) -> None:
    """One prompt is due 3 s from now, one never; where the order is that of arrival both come before any newcomer."""
    scheduler, _ = make_scheduler(policy=policy)
    scheduler.schedule(10.0)
    scheduler.add(make_request("soon", range(20), due_s=13.0))
    scheduler.add(make_request("whenever", range(30, 40)))
    assert len(expected) == len(DUE_WITHIN_S)
    assert scheduler.stats(0.0).due_tokens == expected
