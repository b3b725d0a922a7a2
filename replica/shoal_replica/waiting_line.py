"""The waiting sequences, as one step goes through them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Sequence


class WaitingLine:
    """Waiting sequences in order, each considered once per step: budget, slots and blocks only shrink within a step, so
    an answer holds for all of it. For sequences that wait for another's prompt, it counts the slots and blocks to
    reserve.

    Attributes:
        computing: running sequences with prompts to compute, which others may wait for; those that start are added.
        num_kept_slots, num_kept_blocks: reserved for sequences that wait for another's prompt.
    """

    def __init__(self, waiting: Iterable[Sequence], computing: Iterable[Sequence], kv: KVCacheManager) -> None:
        self.computing = list(computing)
        self.num_kept_slots = self.num_kept_blocks = 0
        self._line = deque(waiting)
        self._kv = kv
        self._kept_hashes: set[BlockHash] = set()

    def __bool__(self) -> bool:
        return bool(self._line)

    @property
    def first(self) -> Sequence:
        return self._line[0]

    def pass_first(self) -> None:
        self._line.popleft()

    def close(self) -> None:
        """Start no further sequence in this step."""
        self._line.clear()

    def keep(self, sequence: Sequence, num_given: int) -> None:
        """Reserve a slot and blocks for ``sequence``, but none for its first ``num_given``, which the sequence that it
        waits for holds already. Blocks that several waiting sequences share are counted once.
        """
        hashes, kept = sequence.block_hashes, self._kept_hashes
        first = bisect_left(hashes, True, lo=num_given, key=lambda block_hash: block_hash not in kept)
        kept.update(hashes[first:])
        self.num_kept_slots += sequence.request.sampling_params.beam_width
        self.num_kept_blocks += self._kv.num_blocks_for(sequence.num_tokens + 1) - first
