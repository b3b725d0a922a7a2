"""Prompt blocks on their way: a replica will have them by the time another request gets to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shoal_cluster.policies.replica_bits import WORD_BITS, Words
from shoal_replica.prefix_cache import BlockHash


class ExpectedBlocks:
    """Block hash → the replicas where it is expected, bit i for the replica in slot i of the ``PrefixIndex``.

    As large as the prompts that were sent and not computed yet: a dictionary, while the index is a table.
    """

    def __init__(self) -> None:
        self._slots: dict[BlockHash, int] = {}
        self.num_changes = 0

    def add(self, slot: int, block_hashes: Iterable[BlockHash]) -> None:
        """They are expected at ``slot``. Twice is once."""
        self.num_changes += 1
        slots, bit = self._slots, 1 << slot
        new = dict.fromkeys(block_hashes, bit)
        if slots.keys().isdisjoint(new):
            slots.update(new)
            return
        for block_hash in new:
            slots[block_hash] = slots.get(block_hash, 0) | bit

    def remove(self, slot: int, block_hashes: Iterable[BlockHash]) -> None:
        """They are expected there no longer. What was not is ignored."""
        self.num_changes += 1
        slots, bit = self._slots, 1 << slot
        for block_hash in block_hashes:
            if held := slots.pop(block_hash, 0) & ~bit:
                slots[block_hash] = held

    def drop(self, slot: int) -> None:
        """Nothing is expected at ``slot``."""
        self.remove(slot, [block_hash for block_hash, held in self._slots.items() if held >> slot & 1])

    def num_held(self, slot: int) -> int:
        """How many are expected at ``slot``."""
        return sum(held >> slot & 1 for held in self._slots.values())

    def has_any(self, block_hashes: Sequence[BlockHash]) -> bool:
        """Whether one of them is expected anywhere."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(block_hashes)

    def is_at(self, slot: int, block_hashes: Sequence[BlockHash]) -> bool:
        """Whether one of them is expected at ``slot``."""
        get = self._slots.get
        return any(get(block_hash, 0) >> slot & 1 for block_hash in block_hashes)

    def rows(self, block_hashes: Sequence[BlockHash], num_words: int) -> Words:
        """Where each is expected, in words of 64 slots [n, words]."""
        rows: Words = np.zeros((len(block_hashes), num_words), np.uint64)
        for row, held in enumerate(map(self._slots.get, block_hashes)):
            if held:
                rows[row] = np.frombuffer(held.to_bytes(num_words * WORD_BITS // 8, "little"), np.uint64)
        return rows
