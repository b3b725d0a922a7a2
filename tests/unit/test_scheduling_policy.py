"""Which request runs first under a policy, and the prompt tokens that a replica reports as ahead of a newcomer."""

from __future__ import annotations

import pytest

from shoal_cluster.config import ReplicaSettings
from shoal_replica.request import Request
from shoal_replica.stats import DUE_WITHIN_S
from shoal_replica.testing import make_request, make_scheduler


@pytest.mark.parametrize(
    ("policy", "expected"), [("deadline", (0, 0, 20, 20, 20, 20, 30)), ("fcfs", (30, 30, 30, 30, 30, 30, 30))]
)
def test_due_tokens_are_those_that_come_before(policy: str, expected: tuple[int, ...]) -> None:
    """One prompt is due in 3 s, one has no due date; in order of arrival, both come before any newcomer."""
    scheduler, _ = make_scheduler(policy=policy)
    scheduler.schedule(10.0)
    scheduler.add(make_request("soon", range(20), due_s=13.0))
    scheduler.add(make_request("whenever", range(30, 40)))
    assert len(expected) == len(DUE_WITHIN_S)
    assert scheduler.stats(0.0).due_tokens == expected


def order(*requests: Request, policy: str) -> list[str]:
    """The requests' ids in the order in which a replica with a single slot finishes them."""
    scheduler, executor = make_scheduler(policy=policy, max_num_seqs=1)
    for request in requests:
        scheduler.add(request)
    finished: list[str] = []
    while (step := scheduler.schedule(10.0)) is not None:
        finished += [
            delta.request_id for delta in scheduler.update(step, executor.execute(step)) if delta.finish_reason
        ]
    return finished


def test_a_clusters_replicas_go_by_priority_then_date_then_arrival() -> None:
    policy = ReplicaSettings().policy
    undated = [make_request(name, arrival_s=i) for i, name in enumerate("abc")]
    late, soon = make_request("late", arrival_s=3.0, due_s=30.0), make_request("soon", arrival_s=4.0, due_s=20.0)
    first = make_request("first", arrival_s=5.0, priority=-1)
    assert order(*undated, policy=policy) == order(*undated, policy="fcfs") == ["a", "b", "c"]
    assert order(*undated, late, soon, first, policy=policy) == ["first", "soon", "late", "a", "b", "c"]


@pytest.mark.parametrize(("policy", "is_urgent"), [("priority", True), ("deadline", True), ("fcfs", False)])
def test_what_is_more_urgent_does_not_wait_for_what_was_preempted(policy: str, is_urgent: bool) -> None:
    scheduler, executor = make_scheduler(num_blocks=24, block_size=4, max_num_seqs=8, policy=policy, max_model_len=96)
    scheduler.add(make_request("grows", range(1000, 1010), max_tokens=80, arrival_s=0.0, due_s=1.0))
    scheduler.add(make_request("batch", range(2000, 2060), max_tokens=36, priority=9, arrival_s=1.0, due_s=900.0))
    first: dict[str, int] = {}
    for step in range(200):
        if step == 20:
            assert scheduler.totals.num_preemptions == 1
            scheduler.add(make_request("urgent", range(3000, 3004), max_tokens=2, arrival_s=2.0, due_s=2.0))
            scheduler.add(make_request("like it", range(4000, 4004), priority=9, max_tokens=2, arrival_s=3.0))
        if (output := scheduler.schedule(float(step))) is None:
            break
        for delta in scheduler.update(output, executor.execute(output)):
            first.setdefault(delta.request_id, step)
        scheduler.check_invariants()
    assert first.keys() == {"grows", "batch", "urgent", "like it"}
    assert (first["urgent"] == 20) == is_urgent
    assert first["like it"] >= 80, "it waits until what was preempted is back"
