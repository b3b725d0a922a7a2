"""The upper bound of what placement can achieve: one prefix cache for all replicas, with free and instant transfers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_replica.prefix_cache import BlockHash


class SharedPool:
    """An LRU cache as large as those of all replicas together, which holds no block twice."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()
        self.version = 0

    def store(self, block_hashes: Iterable[BlockHash]) -> None:
        """Cache these blocks as the most recently used; evict the least recently used ones beyond the capacity."""
        self.version += 1
        for block_hash in block_hashes:
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._num_blocks:
            self._hashes.popitem(last=False)

    def match(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks are cached."""
        for count, block_hash in enumerate(block_hashes):
            if block_hash not in self._hashes:
                return count
        return len(block_hashes)

    def use(self, block_hashes: Sequence[BlockHash]) -> int:
        """``match`` for a prompt that reuses the blocks: they become the most recently used, the first block last, so
        that a prefix loses its tail before its head.
        """
        count = self.match(block_hashes)
        for block_hash in reversed(block_hashes[:count]):
            self._hashes.move_to_end(block_hash)
        return count


class SharedIndex(PrefixIndex):
    """A gateway's prefix index when every replica can use the shared pool."""

    def __init__(self, pool: SharedPool) -> None:
        super().__init__()
        self._pool = pool

    @property
    def version(self) -> int:
        return super().version + self._pool.version

    def match_slots(self, block_hashes: Sequence[BlockHash]) -> Ints:
        return np.full_like(super().match_slots(()), self._pool.match(block_hashes))
