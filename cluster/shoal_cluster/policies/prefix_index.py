"""Which replicas hold which prefix blocks, as far as the gateway has been told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shoal_replica.prefix_cache import BlockHash

DEFAULT_MAX_ENTRIES = 1_000_000


class PrefixIndex:
    """BlockHash → the set of replicas that hold it, one bit of an int for each replica.

    A hash covers every token before it, so a flat map is a prefix tree: a prefix is held as far as its hashes are.
    ``max_entries`` is a hard cap; past it the least recently used hash is forgotten (a forgotten hash only costs a
    predicted hit, never a wrong answer). A use is ``store`` or ``touch``; ``match`` only asks.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}; must be at least 1")
        self.max_entries = max_entries
        self._mask_of: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._slot_of: dict[str, int] = {}
        self._replica_of: dict[int, str] = {}
        self._num_held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._mask_of)

    def num_held(self, replica_id: str) -> int:
        """How many hashes the index knows ``replica_id`` to hold."""
        return self._num_held.get(replica_id, 0)

    def replica_ids(self) -> frozenset[str]:
        """Replicas that the index has heard of."""
        return frozenset(self._slot_of)

    def store(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` now holds ``block_hashes``. Storing one twice is once."""
        bit = 1 << self._take_slot(replica_id)
        num_new = 0
        for block_hash in block_hashes:
            mask = self._mask_of.get(block_hash, 0)
            self._mask_of[block_hash] = mask | bit
            if mask:
                self._mask_of.move_to_end(block_hash)
            num_new += not mask & bit
        self._num_held[replica_id] += num_new
        while len(self._mask_of) > self.max_entries:
            self._forget_oldest()

    def remove(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` no longer holds ``block_hashes``. What it was not known to hold is ignored."""
        slot = self._slot_of.get(replica_id)
        if slot is None:
            return
        bit = 1 << slot
        for block_hash in block_hashes:
            mask = self._mask_of.get(block_hash, 0)
            if not mask & bit:
                continue
            self._num_held[replica_id] -= 1
            if mask == bit:
                del self._mask_of[block_hash]
            else:
                self._mask_of[block_hash] = mask ^ bit

    def drop(self, replica_id: str) -> None:
        """Forget ``replica_id`` and all it holds: one pass over the index."""
        slot = self._slot_of.get(replica_id)
        if slot is None:
            return
        bit = 1 << slot
        if self._num_held[replica_id]:
            self.remove(replica_id, [h for h, mask in self._mask_of.items() if mask & bit])
        del self._slot_of[replica_id], self._replica_of[slot], self._num_held[replica_id]

    def replace(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """A snapshot: ``replica_id`` holds ``block_hashes`` and nothing else."""
        self.drop(replica_id)
        self.store(replica_id, block_hashes)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each replica that holds the first block or more: how many leading blocks it holds without a hole."""
        matched: dict[str, int] = {}
        holders = -1
        num_blocks = 0
        for block_hash in block_hashes:
            still = holders & self._mask_of.get(block_hash, 0)
            if still != holders and num_blocks:
                self._note(matched, holders & ~still, num_blocks)
            holders = still
            if not holders:
                return matched
            num_blocks += 1
        if num_blocks:
            self._note(matched, holders, num_blocks)
        return matched

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """``block_hashes`` were used: the deepest first, so that a prefix loses its tail before its head."""
        for block_hash in reversed(block_hashes):
            if block_hash in self._mask_of:
                self._mask_of.move_to_end(block_hash)

    def check_invariants(self) -> None:
        """Every mask is of known replicas and not empty, every count is true, the cap holds."""
        assert len(self._mask_of) <= self.max_entries
        assert {slot: replica_id for replica_id, slot in self._slot_of.items()} == self._replica_of
        assert self._num_held.keys() == self._slot_of.keys()
        known = sum(1 << slot for slot in self._replica_of)
        counts = dict.fromkeys(self._slot_of, 0)
        for mask in self._mask_of.values():
            assert mask > 0
            assert mask & ~known == 0
            for slot, replica_id in self._replica_of.items():
                counts[replica_id] += mask >> slot & 1
        assert counts == self._num_held

    def _take_slot(self, replica_id: str) -> int:
        slot = self._slot_of.get(replica_id)
        if slot is None:
            slot = next(i for i in range(len(self._replica_of) + 1) if i not in self._replica_of)
            self._slot_of[replica_id] = slot
            self._replica_of[slot] = replica_id
            self._num_held[replica_id] = 0
        return slot

    def _note(self, matched: dict[str, int], mask: int, num_blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            matched[self._replica_of[lowest.bit_length() - 1]] = num_blocks
            mask ^= lowest

    def _forget_oldest(self) -> None:
        _, mask = self._mask_of.popitem(last=False)
        while mask:
            lowest = mask & -mask
            self._num_held[self._replica_of[lowest.bit_length() - 1]] -= 1
            mask ^= lowest
