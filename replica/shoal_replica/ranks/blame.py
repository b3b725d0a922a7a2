"""Which rank is at fault when none makes progress."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.ranks.channel import Pulse


def stuck_ranks(pulses: Sequence[Pulse], step: int, tensor_size: int) -> list[int]:
    """The ranks that have not finished ``step`` and do not wait for another such rank: at least one, in rank order.

    A rank waits for the rank of another stage that its pulse names. If it names none, it waits for those ranks of its
    own stage that have begun fewer collectives, since all of them make the same ones. Counts of different stages cannot
    be compared.

    Args:
        pulses: the last pulse of each rank.
        tensor_size: ranks per stage.
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
