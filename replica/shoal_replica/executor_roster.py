"""Which sequences the executor holds, and those that it has to drop."""

from __future__ import annotations

from shoal_replica.beam_search import num_candidates
from shoal_replica.finish_rule import FinishRule
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.request import Sequence
from shoal_replica.step_plan import StepPlan


class ExecutorRoster:
    """A sequence is introduced in full once; it is dropped when it has ended or lost its blocks."""

    def __init__(self, kv: KVCacheManager, finish: FinishRule) -> None:
        self._kv = kv
        self._finish = finish
        self._held: set[int] = set()
        self._dropped: list[int] = []

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def introduce(self, plan: StepPlan, sequence: Sequence) -> None:
        """Send a sequence in full with the step."""
        self._held.add(sequence.seq_id)
        count = num_candidates(sequence.request, self._finish)
        plan.introduce(sequence, self._kv.block_table(sequence.seq_id), count)

    def drop(self, sequence: Sequence) -> None:
        """Have the next step drop it, if it is held."""
        if sequence.seq_id in self._held:
            self._held.remove(sequence.seq_id)
            self._dropped.append(sequence.seq_id)

    def take_dropped(self) -> tuple[int, ...]:
        """Those dropped since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
