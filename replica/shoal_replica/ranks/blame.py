"""Which rank is at fault when none gets on."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.ranks.channel import Pulse


def stuck_ranks(pulses: Sequence[Pulse], step: int, tensor_size: int) -> list[int]:
    """The ranks that have not finished ``step`` and wait for none that has not: at least one, in rank order.

    A rank waits for the one of another stage that it says; else for those of its own stage, all of which make the same
    collectives, that have begun fewer. Counts of different stages say nothing about each other.

    Args:
        pulses: the last one of each rank.
        tensor_size: ranks of a stage.
    """
    unfinished = {rank for rank, pulse in enumerate(pulses) if pulse.is_busy or pulse.step < step}

    def awaited(rank: int) -> set[int]:
        pulse, stage = pulses[rank], rank // tensor_size
        if pulse.awaited_rank is not None:
            return {pulse.awaited_rank}
        peers = range(stage * tensor_size, (stage + 1) * tensor_size)
        return {peer for peer in peers if _place(pulses[peer]) < _place(pulse)}

    stuck = [rank for rank in sorted(unfinished) if not awaited(rank) & unfinished]
    return stuck or sorted(unfinished) or list(range(len(pulses)))


def _place(pulse: Pulse) -> tuple[int, int]:
    return pulse.step, pulse.num_collectives
