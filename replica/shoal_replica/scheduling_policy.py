"""Who runs next and who gives way: two pure policies over the scheduler's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from shoal_replica.request import Sequence, SequenceStatus

Rank = tuple[int, float, int]


def rank(sequence: Sequence, policy: str) -> Rank:
    """Sort key of a waiting or running sequence; lower runs first. Total: seq_id breaks ties."""
    priority = sequence.request.priority if policy == "priority" else 0
    return priority, sequence.request.arrival_s, sequence.seq_id


def order_waiting(waiting: Iterable[Sequence], policy: str) -> list[Sequence]:
    """Preempted sequences first, for their tokens are already with the client; then by rank."""
    return sorted(waiting, key=lambda s: (s.status is not SequenceStatus.PREEMPTED, rank(s, policy)))


def choose_victim(running: SequenceOf[Sequence], policy: str) -> Sequence:
    """The running sequence that gives its blocks to the others: the one that would run last."""
    return max(running, key=lambda s: rank(s, policy))
