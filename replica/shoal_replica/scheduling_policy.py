"""Who runs next and who gives way: two pure policies over the scheduler's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from shoal_replica.request import Sequence, SequenceStatus

Rank = tuple[int, float, float, int]


def rank(sequence: Sequence, policy: str) -> Rank:
    """Sort key of a waiting or running sequence; lower runs first. Total: seq_id breaks ties.

    ``fcfs``: by arrival. ``priority``: by the request's priority, then arrival. ``deadline``: by priority, then by when
    the first token is due (earliest deadline first), then arrival.
    """
    request = sequence.request
    priority = 0 if policy == "fcfs" else request.priority
    due_s = request.due_s if policy == "deadline" else 0.0
    return priority, due_s, request.arrival_s, sequence.seq_id


def order_waiting(waiting: Iterable[Sequence], policy: str) -> list[Sequence]:
    """Preempted sequences first, for their tokens are already with the client; then by rank."""
    return sorted(waiting, key=lambda s: (s.status is not SequenceStatus.PREEMPTED, rank(s, policy)))


def choose_victim(running: SequenceOf[Sequence], policy: str) -> Sequence:
    """The running sequence that gives its blocks to the others: the one that would run last."""
    return max(running, key=lambda s: rank(s, policy))
