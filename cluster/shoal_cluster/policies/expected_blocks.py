"""Prompt blocks on their way: a replica will hold them by the time a later request gets there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_replica.prefix_cache import BlockHash


class ExpectedBlocks:
    """Block hash → the replicas where it is expected, bit i for the replica in slot i of the ``PrefixIndex``.

    It covers only prompts that were sent and are not computed yet, so it is a dictionary, where the index is a table.
    Several prompts may bring the same block.
    """

    def __init__(self) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._again: dict[tuple[int, BlockHash], int] = {}  # prompts beyond the first that bring a block there
        self.version = 0

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: int, block_hashes: Sequence[BlockHash]) -> None:
        """One more prompt brings these blocks, all different, to ``slot``."""
        self.version += 1
        slots, bit = self._slots, 1 << slot
        if slots.keys().isdisjoint(block_hashes):
            slots.update(dict.fromkeys(block_hashes, bit))
            return
        for block_hash in block_hashes:
            held = slots.get(block_hash, 0)
            if held & bit:
                self._again[slot, block_hash] = self._again.get((slot, block_hash), 0) + 1
            slots[block_hash] = held | bit

    def remove(self, slot: int, block_hashes: Iterable[BlockHash]) -> None:
        """One prompt fewer brings these blocks to ``slot``. Blocks that none brings there are ignored."""
        self.version += 1
        slots, again, bit = self._slots, self._again, 1 << slot
        for block_hash in block_hashes:
            if again and (count := again.pop((slot, block_hash), 0)):
                if count > 1:
                    again[slot, block_hash] = count - 1
            elif held := slots.pop(block_hash, 0) & ~bit:
                slots[block_hash] = held

    def drop(self, slot: int) -> None:
        """Nothing is expected at ``slot`` any more."""
        self._again = {key: count for key, count in self._again.items() if key[0] != slot}
        self.remove(slot, [block_hash for block_hash, held in self._slots.items() if held >> slot & 1])

    def num_held(self, slot: int) -> int:
        """How many blocks are expected at ``slot``."""
        return sum(held >> slot & 1 for held in self._slots.values())

    def has_any(self, block_hashes: Sequence[BlockHash]) -> bool:
        """Whether any of these blocks is expected anywhere."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(block_hashes)

    def first_at(self, slot: int, block_hashes: Sequence[BlockHash]) -> int:
        """Position of the first of these blocks that is expected at ``slot``; their number if none is."""
        if not self.has_any(block_hashes):
            return len(block_hashes)
        is_there = self.are_at(slot, block_hashes)
        return int(is_there.argmax()) if is_there.any() else len(block_hashes)

    def are_at(self, slot: int, block_hashes: Sequence[BlockHash]) -> NDArray[np.bool_]:
        """Which of these blocks are expected at ``slot`` [n]."""
        get = self._slots.get
        return np.fromiter([get(h, 0) >> slot & 1 for h in block_hashes], np.bool_, len(block_hashes))

    def holders(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """The slots where each block is expected, as bits."""
        get = self._slots.get
        return [get(block_hash, 0) for block_hash in block_hashes]
