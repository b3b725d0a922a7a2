"""Which sequence runs next and which is preempted: pure functions over the scheduler's sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

from shoal_replica.request import Sequence, SequenceStatus
from shoal_replica.stats import DUE_WITHIN_S

Rank = tuple[int, float, float, int, int]


def rank(sequence: Sequence, policy: str) -> Rank:
    """Sort key of a waiting or running sequence; lower runs first. A total order: seq_id breaks ties, but for the
    beams of a request, which stay together.

    ``fcfs``: by arrival. ``priority``: by the request's priority, then arrival. ``deadline``: by priority, then by the
    time at which the first token is due (earliest deadline first), then arrival.
    """
    request = sequence.request
    priority = 0 if policy == "fcfs" else request.priority
    due_s = request.due_s if policy == "deadline" else 0.0
    return priority, due_s, request.arrival_s, sequence.order, sequence.seq_id


def order_waiting(waiting: Iterable[Sequence], policy: str) -> list[Sequence]:
    """Of each priority preempted sequences first, because their clients already have tokens; then by rank."""

    def place(sequence: Sequence) -> tuple[int, bool, Rank]:
        its = rank(sequence, policy)
        return its[0], sequence.status is not SequenceStatus.PREEMPTED, its

    return sorted(waiting, key=place)


def waits_behind(sequence: Sequence, preempted: Sequence | None, policy: str) -> bool:
    """Whether a sequence that has not run is no more urgent than one that was preempted."""
    if preempted is None or sequence.status is not SequenceStatus.WAITING:
        return False
    return rank(preempted, policy)[0] <= rank(sequence, policy)[0]


def by_progress(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Running sequences that still have a prompt to compute, and those that decode. A plain loop for speed."""
    behind: list[Sequence] = []
    level: list[Sequence] = []
    for sequence in running:
        (level if len(sequence.token_ids) - sequence.num_computed_tokens == 1 else behind).append(sequence)
    return behind, level


def insert(running: list[Sequence], sequence: Sequence, policy: str) -> None:
    """Put a sequence in its place among the running ones, which are in rank order."""
    insort(running, sequence, key=lambda s: rank(s, policy))


def choose_victim(running: SequenceOf[Sequence], policy: str) -> Sequence:
    """The running sequence to preempt: the one with the lowest rank, which would run last."""
    return max(running, key=lambda s: rank(s, policy))


def due_profile(sequences: Iterable[Sequence], now: float, policy: str) -> tuple[int, ...]:
    """For each bound in ``DUE_WITHIN_S``: tokens (cached ones included) to compute before a new request that is due
    within that time. Only under the ``deadline`` policy does such a request go before those that are due later.
    """
    profile = [0] * len(DUE_WITHIN_S)
    for sequence in sequences:
        if sequence.num_behind > 1:
            left_s = sequence.request.due_s - now if policy == "deadline" else 0.0
            profile[bisect_left(DUE_WITHIN_S, left_s)] += sequence.num_behind
    return tuple(accumulate(profile))
