"""Which replicas hold which prefix blocks, as far as the gateway has been told."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.expected_blocks import ExpectedBlocks
from shoal_cluster.policies.holder_table import ONE, HolderTable, Words
from shoal_cluster.policies.replica_bits import ALL, Changes, Ints, add_lengths
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

CROWDED = 0.25  # of the entries taken: from there on sets begin to fill up
FIRST_LOOK, NEXT_LOOK = 128, 8  # blocks of a prompt looked up at first, and how many times more each time after
FEW = 4  # changed blocks that are sooner looked up one by one
KEY_BYTES = 8
NO_KEYS: Words = np.zeros(0, np.uint64)
DEFAULT_MAX_ENTRIES = 2**21
"""42 MB. Half full, at a million blocks, one entry in 100 000 is forgotten early."""


class PrefixIndex:
    """Block hash → the replicas that hold it; beside it, ``expected``: what they will hold.

    A hash covers every token before it, and its salt and adapter, so a flat map is a prefix tree: a prefix is held as
    far as its hashes are. A replica's memories count as one, whose blocks cost a transfer at most; memories apart would
    be holders of their own.
    The map is a ``HolderTable`` of halves of the hashes, from which what was used least recently goes when there is no
    room (a forgotten hash only costs a predicted hit, never a wrong answer). So memory is fixed, 20 bytes an entry, but
    for the sets of holders that differ, which are few. A use is ``store`` or ``touch``; ``match`` only asks.

    Attributes:
        is_by_replica: news of one replica change the answers for that one alone, as long as nothing is evicted.

    Args:
        max_entries: hard cap; rounded up to whole sets, their number a power of two.
    """

    is_by_replica = True

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}; must be at least 1")
        self._table = HolderTable(max_entries)
        self.max_entries = self._table.max_entries
        self._num_changes = 0
        self._found: _Found | None = None  # by the last question
        self._slot_of: dict[str, int] = {}
        self.expected = ExpectedBlocks()

    def __len__(self) -> int:
        return self._table.num_entries

    @property
    def num_evicted(self) -> int:
        return self._table.num_evicted

    @property
    def version(self) -> int:
        """While it stays the same, so do the answers."""
        return self._num_changes + self.expected.num_changes

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.num_bytes

    def num_held(self, replica_id: str) -> int:
        """How many hashes the index knows ``replica_id`` to hold."""
        slot = self._slot_of.get(replica_id)
        return 0 if slot is None else int(self._table.num_held[slot])

    def replica_ids(self) -> frozenset[str]:
        """Replicas that the index has heard of."""
        return frozenset(self._slot_of)

    def store(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` now holds ``block_hashes``, deeper ones last. Storing one twice is once."""
        slot, block_hashes = self._take_slot(replica_id), dict.fromkeys(block_hashes)
        if not block_hashes:
            return
        self._num_changes += 1
        if len(block_hashes) <= FEW:
            self._table.hold_few(slot, [*dict.fromkeys(_key_of(block_hash) for block_hash in block_hashes)])
        else:
            keys = _different(_keys_of(block_hashes))
            self._table.hold(slot, keys, *self._table.find(keys))

    def expect(self, replica_id: str, block_hashes: Sequence[BlockHash], num_held: int) -> Sequence[BlockHash]:
        """A prompt goes to ``replica_id``, which holds its first ``num_held`` blocks or will: these are used. All
        others are expected there, and those from the first that was expected only. Returns what is expected of it: each
        is until ``expected.remove`` takes it away at the ``slot``.
        """
        self.touch(block_hashes, num_held)
        slot = self._take_slot(replica_id)
        rest = block_hashes[self.expected.first_at(slot, block_hashes[:num_held]) :]
        self.expected.add(slot, rest)
        return rest

    def change(self, replica_id: str, stored: Collection[BlockHash], removed: Collection[BlockHash]) -> None:
        """``remove``, then ``store``; no hash is in both. Many are looked up at once."""
        gone, keys = dict.fromkeys(removed), NO_KEYS
        if min(len(stored), len(removed)) > FEW:
            keys = _keys_of(itertools.chain(gone, dict.fromkeys(stored)))
        if not keys.size or _different(keys) is not keys:
            self.remove(replica_id, removed)
            self.store(replica_id, stored)
            return
        self._num_changes += 1
        slot = self._take_slot(replica_id)
        rows, entries = self._table.find(keys)
        num_known = int(np.count_nonzero(rows < len(gone)))  # rows rise
        self._table.release(slot, entries[:num_known])
        self._table.hold(slot, keys[len(gone) :], rows[num_known:] - len(gone), entries[num_known:])

    def remove(self, replica_id: str, block_hashes: Collection[BlockHash]) -> None:
        """``replica_id`` no longer holds ``block_hashes``. What it was not known to hold is ignored."""
        slot = self._slot_of.get(replica_id)
        if slot is None or not block_hashes:
            return
        self._num_changes += 1
        if len(block_hashes) <= FEW:
            self._table.release_few(slot, [_key_of(block_hash) for block_hash in block_hashes])
        else:
            self._table.release(slot, self._table.find(_different(_keys_of(block_hashes)))[1])

    def drop(self, replica_id: str) -> None:
        """Forget ``replica_id``, all it holds and all that is expected there: one pass over the index."""
        self._clear_all(replica_id)
        if (slot := self._slot_of.pop(replica_id, None)) is not None:
            self.expected.drop(slot)

    def replace(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """A snapshot: ``replica_id`` has ``block_hashes`` in its pool and nothing else."""
        self._clear_all(replica_id)
        self.store(replica_id, block_hashes)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each replica that holds the first block or more, or will: how many leading blocks without a hole."""
        counts = self.match_slots(block_hashes).tolist()
        return {replica_id: counts[slot] for replica_id, slot in self._slot_of.items() if counts[slot]}

    def match_slots(self, block_hashes: Sequence[BlockHash]) -> Ints:
        """``match`` as an array, at each replica's ``slot``: shape [slots]."""
        counts: Ints = np.zeros(self._table.num_held.size, np.int64)
        table, keys = self._table, _keys_of(block_hashes)
        is_expected = self.expected.has_any(block_hashes)
        start, stop = 0, FIRST_LOOK
        alive = ALL  # who has all so far
        while start < keys.size:
            look = keys[start:stop]
            rows, entries = table.find(look)
            num_leading = _leading(rows)
            if look.size == keys.size:
                self._found = _Found(block_hashes, self._num_changes, rows, entries, num_leading)
            held: Changes
            if is_expected:
                num_rows, each = look.size, self.expected.holders(block_hashes[start:stop])
                for row, holders in zip(rows.tolist(), table.holders(entries), strict=True):
                    each[row] |= holders
                held = enumerate(each)
            else:
                if not num_leading:
                    break
                num_rows, held = num_leading, table.holder_changes(entries[:num_leading])  # up to the first hole
            alive = add_lengths(counts, held, num_rows, alive)
            if num_rows < look.size or not alive:
                break
            start, stop = stop, stop * NEXT_LOOK
        return counts

    def match_slot(self, slot: int, block_hashes: Sequence[BlockHash]) -> int:
        """``match_slots`` at one ``slot``."""
        rows, entries = self._table.find(_keys_of(block_hashes))
        rows = rows[self._table.is_held(entries, slot)]
        count = _leading(rows)
        if not self.expected.is_at(slot, block_hashes[count : count + 1]):
            return count
        is_there = self.expected.are_at(slot, block_hashes)
        is_there[rows] = True
        return len(block_hashes) if is_there.all() else int(is_there.argmin())

    def is_at(self, slot: int, block_hash: BlockHash) -> bool:
        """Whether the replica in ``slot`` holds it, or will."""
        return self._table.is_held_at(slot, _key_of(block_hash)) or self.expected.is_at(slot, (block_hash,))

    def slot(self, replica_id: str) -> int:
        """Where ``match_slots`` counts for ``replica_id``; it keeps the place until it is dropped."""
        return self._take_slot(replica_id)

    def touch(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        """The first ``count`` of ``block_hashes``, all unless given, were used: a prefix loses its tail before its
        head. While there is much room, who was used when does not matter, and nothing is noted. What ``match_slots``
        has just found of the same prompt is not looked up again.
        """
        if self._table.num_entries < CROWDED * self.max_entries or not block_hashes:
            return
        count = len(block_hashes) if count is None else count
        found = self._found
        if found is not None and found.block_hashes is block_hashes and found.num_changes == self._num_changes:
            if count <= found.num_leading:
                self._table.use(found.entries[:count], None, count)
                return
            num_known = int(np.count_nonzero(found.rows < count))  # rows rise
            rows, entries = found.rows[:num_known], found.entries[:num_known]
        else:
            rows, entries = self._table.find(_keys_of(block_hashes[:count]))
        self._table.use(entries, rows, count)

    def check_invariants(self) -> None:
        """The table's, of the replicas that are known; each has a slot of its own."""
        self._table.check_invariants(self._slot_of.values())
        assert len(set(self._slot_of.values())) == len(self._slot_of)

    def _clear_all(self, replica_id: str) -> None:
        if self.num_held(replica_id):
            slot = self._slot_of[replica_id]
            self._num_changes += 1
            self._table.release(slot, self._table.held_by(slot))

    def _take_slot(self, replica_id: str) -> int:
        slot = self._slot_of.get(replica_id)
        if slot is None:
            taken = set(self._slot_of.values())
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            self._slot_of[replica_id] = slot
            if slot >= self._table.num_held.size:
                self._table.add_slots()
        return slot


class _Found(NamedTuple):
    """What ``_find`` found of a prompt after so many changes of the table."""

    block_hashes: Sequence[BlockHash]
    num_changes: int
    rows: Ints
    entries: Ints
    num_leading: int  # of the rows, without a hole


def _keys_of(block_hashes: Iterable[BlockHash]) -> Words:
    """Eight bytes of each hash, never 0: two of a million blocks meet with a chance of 5e-8."""
    whole = np.frombuffer(b"".join(block_hashes), np.uint64)
    keys: Words = whole[:: DIGEST_BYTES // 8] | ONE
    return keys


def _different(keys: Words) -> Words:
    """Without those that have come before: hashes may be forged that share a key."""
    if len(set(keys.tolist())) == keys.size:
        return keys
    return keys[np.sort(np.unique(keys, return_index=True)[1])]


def _key_of(block_hash: BlockHash) -> int:
    """The same of one."""
    return int.from_bytes(block_hash[:KEY_BYTES], sys.byteorder) | 1


def _leading(rows: Ints) -> int:
    """How many of ``rows``, which rise, are 0, 1, 2, ... without a hole."""
    if not rows.size or rows.item(-1) == rows.size - 1:
        return rows.size
    return int(np.count_nonzero(rows == np.arange(rows.size)))
