"""Makes room for running sequences that grow, by taking the blocks of those that rank last."""

from __future__ import annotations

from collections.abc import Callable

from shoal_replica.beams import Beams
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.request import Sequence, SequenceStatus
from shoal_replica.scheduling_policy import choose_victim
from shoal_replica.stats import Totals


class Preemption:
    """Preempts running sequences, the beams of a request all together.

    Args:
        kv, running, beams, totals: the scheduler's own, as they change.
        requeue: puts a preempted sequence back among the waiting ones.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: list[Sequence],
        beams: Beams,
        policy: str,
        totals: Totals,
        requeue: Callable[[Sequence], None],
    ) -> None:
        self._kv = kv
        self._running = running
        self._beams = beams
        self._policy = policy
        self._totals = totals
        self._requeue = requeue

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt from the back until ``sequence`` can grow to ``num_tokens``. False if it was preempted itself."""
        while sequence.status is SequenceStatus.RUNNING:
            needed = self._kv.num_blocks_to_append(sequence.seq_id, sequence.num_computed_tokens, num_tokens)
            if needed <= self._kv.pool.num_free:
                return True
            self._preempt_last()
        return False

    def make_room_for_beams(self, unit: list[Sequence]) -> bool:
        """Preempt from the back until all beams of a request can grow by a token. False if they were preempted
        themselves.
        """
        seq_ids, start = [s.seq_id for s in unit], unit[0].num_computed_tokens
        while unit[0].status is SequenceStatus.RUNNING:
            if self._kv.num_blocks_to_append_to_all(seq_ids, start, start + 1) <= self._kv.pool.num_free:
                return True
            self._preempt_last()
        return False

    def _preempt_last(self) -> None:
        sequence = self._beams.collapse(choose_victim(self._running, self._policy))
        self._kv.free(sequence.seq_id)
        self._running.remove(sequence)
        sequence.preempt()
        self._totals.num_preemptions += 1
        self._requeue(sequence)
