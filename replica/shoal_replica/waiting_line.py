"""Those who wait for a place, as one step comes to them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Sequence


class WaitingLine:
    """In order, each looked at once: a step's budget, slots and blocks only grow less, so that an answer stands for all
    of it. Of those who are to wait for another's prompt, it keeps count of what must be left for them.

    Attributes:
        computing: running sequences with prompts to compute, whom they may wait for; those that start join them.
        num_kept_slots, num_kept_blocks: for those who wait for a prompt.
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
        """Nobody else starts in this step."""
        self._line.clear()

    def keep(self, sequence: Sequence, num_given: int) -> None:
        """A slot for ``sequence``, and its blocks: less the first ``num_given``, which the one it waits for has, and
        less those that it has in common with others who wait, for they are kept once.
        """
        hashes, kept = sequence.block_hashes, self._kept_hashes
        first = bisect_left(hashes, True, lo=num_given, key=lambda block_hash: block_hash not in kept)
        kept.update(hashes[first:])
        self.num_kept_slots += 1
        self.num_kept_blocks += self._kv.num_blocks_for(sequence.num_tokens + 1) - first
