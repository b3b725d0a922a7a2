"""The hash table of the prefix index: keys, each in its set of ways, with the slots that hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import eq, ne
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.holder_sets import HolderSets
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.native_table import NativeTable
from shoal_cluster.policies.replica_bits import ALL, Bools, Changes, add, add_lengths
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

Words = NDArray[np.uint64]
Numbers = NDArray[np.uint32]

LOG_WAYS = 5
NUM_WAYS = 1 << LOG_WAYS
ONE, SET_SHIFT, WAY_MASK = np.array(1, np.uint64), np.array(LOG_WAYS), np.array(NUM_WAYS - 1)  # fastest as arrays
FIRST_SLOTS = 64
FIRST_LOOK, NEXT_LOOK = 128, 8  # a prompt's first lookup ends at this block, each next one so many times further


class Table(Protocol):
    """Block hash → the slots that hold it; a hash without holders is not in it. At most ``max_entries``: where there
    is no room, a new hash replaces what was used least recently.
    """

    @property
    def max_entries(self) -> int: ...
    @property
    def num_entries(self) -> int: ...
    @property
    def num_evicted(self) -> int:
        """Entries that were evicted to make room for others."""
        ...

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_slots(self) -> int: ...

    def num_held(self, slot: int) -> int:
        """Number of hashes that the slot holds."""
        ...

    def add_slots(self) -> None:
        """Double the number of slots."""
        ...

    def hold(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        """The slot now holds these. They count as used now, the first one most recently."""
        ...

    def release(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        """The slot no longer holds these. Those that it did not hold are ignored."""
        ...

    def release_all(self, slot: int) -> None:
        """The slot no longer holds anything: one pass over the table."""
        ...

    def use(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        """Those of the first ``count`` hashes, or of all, that are known were used, the first one most recently."""
        ...

    def lengths(self, block_hashes: Sequence[BlockHash], also: Sequence[int] = ()) -> Ints:
        """How many leading hashes each slot holds [slots]. ``also``: further holders of each, as bits; or none."""
        ...

    def check_invariants(self, slots: Iterable[int]) -> None:
        """Every entry is in its set, only once, and held by some of ``slots``; all counts are right; the cap holds."""
        ...


def make_table(max_entries: int) -> Table:
    """A table of ``max_entries``, rounded up to a power of two of whole sets; native where that was built."""
    num_sets = 1 << (-(-max_entries // NUM_WAYS) - 1).bit_length()
    return (HolderTable if library is None else NativeTable)(num_sets * NUM_WAYS)


class HolderTable:
    """A ``Table`` of numpy arrays: a key, half of a hash, → the number of its set of slots in a ``HolderSets``.

    Laid out like a set-associative processor cache: a part of the key selects a set of 32 ways, and a new key replaces
    the least recently used entry of a full set. Keys are looked up in batches, by array operations. They are odd: 0
    marks a free way.
    """

    def __init__(self, max_entries: int) -> None:
        num_sets = max_entries // NUM_WAYS
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_evicted = 0
        self._num_held: Ints = np.zeros(FIRST_SLOTS, np.int64)
        self._set_mask = np.array(num_sets - 1, np.uint64)
        # The system provides zeroed pages on the first write, so an empty table takes no memory.
        self._keys: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # 0: the way is free
        self._used: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # tick of the last use
        self._holders: Numbers = np.zeros((num_sets, NUM_WAYS), np.uint32)  # numbers in ``_sets``; 0 of a free way
        self._sets = HolderSets()
        self._tick = 0

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._used.nbytes + self._holders.nbytes + self._sets.num_bytes

    @property
    def num_slots(self) -> int:
        return self._num_held.size

    def num_held(self, slot: int) -> int:
        return int(self._num_held[slot])

    def add_slots(self) -> None:
        self._num_held = np.concatenate([self._num_held, np.zeros_like(self._num_held)])

    def hold(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        keys = _different(_keys_of(block_hashes))
        rows, entries = self._find(keys)
        num_new = keys.size
        ticks = self._next_ticks(keys.size)
        if rows.size:
            before = self._numbers(entries).tolist()
            after = self._sets.add(slot, before)
            num_new -= sum(map(eq, before, after))
            self._holders.reshape(-1)[entries] = after
            self._used.reshape(-1)[entries] = ticks[rows]
            is_new = np.ones(keys.size, np.bool_)
            is_new[rows] = False
            keys, ticks = keys[is_new], ticks[is_new]
        self._num_held[slot] += num_new
        if keys.size:
            self._insert(keys, ticks, slot)

    def release(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        self._let_go(slot, self._find(_different(_keys_of(block_hashes)))[1])

    def release_all(self, slot: int) -> None:
        is_with: Bools = np.array(self._sets.with_slot(slot))
        self._let_go(slot, np.flatnonzero(is_with.take(self._holders)))

    def use(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        used = block_hashes[:count]
        rows, entries = self._find(_keys_of(used))
        self._used.reshape(-1)[entries[::-1]] = self._next_ticks(len(used))[rows[::-1]]

    def lengths(self, block_hashes: Sequence[BlockHash], also: Sequence[int] = ()) -> Ints:
        counts: Ints = np.zeros(self.num_slots, np.int64)
        keys = _keys_of(block_hashes)
        start, stop = 0, FIRST_LOOK
        alive = ALL  # slots that hold all hashes so far
        while start < keys.size:
            look = keys[start:stop]
            rows, entries = self._find(look)
            held: Changes
            if also:
                num_rows, each = look.size, list(also[start:stop])
                for row, number in zip(rows.tolist(), self._numbers(entries).tolist(), strict=True):
                    each[row] |= self._sets.bits[number]
                held = enumerate(each)
            elif num_rows := _leading(rows):
                held = self._holder_changes(entries[:num_rows])  # up to the first gap
            else:
                held, num_rows, alive = (), 0, 0
            alive = add_lengths(counts, held, num_rows, alive)
            if num_rows < look.size or not alive:
                break
            start, stop = stop, stop * NEXT_LOOK
        return counts

    def check_invariants(self, slots: Iterable[int]) -> None:
        keys = self._keys.reshape(-1)
        taken = np.flatnonzero(keys)
        assert taken.size == self.num_entries <= self.max_entries
        assert np.array_equal(self._sets_of(keys[taken]), taken // NUM_WAYS)
        assert np.unique(keys[taken]).size == taken.size
        assert np.array_equal(np.flatnonzero(self._used), taken)
        assert np.array_equal(np.flatnonzero(self._holders), taken)
        self._sets.check_invariants(self._numbers(taken).tolist())
        counts = np.zeros_like(self._num_held)
        for number in self._numbers(taken).tolist():
            add(counts, self._sets.bits[number], 1)
        assert np.array_equal(counts, self._num_held)
        assert set(np.flatnonzero(counts).tolist()) <= set(slots)

    def _find(self, keys: Words) -> tuple[Ints, Ints]:
        """The ascending positions of those ``keys`` that are known, and the entry of each."""
        sets = self._sets_of(keys)
        hits: Ints = (self._keys.take(sets, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        rows = hits >> SET_SHIFT
        entries = sets.take(rows) << SET_SHIFT
        entries += hits & WAY_MASK
        return rows, entries

    def _holder_changes(self, entries: Ints) -> Changes:
        """The holders of each as (row, bits), without rows that are known to have the same bits as the row before."""
        numbers, bits = self._numbers(entries), self._sets.bits
        whole = numbers.tobytes()
        if whole == whole[: numbers.itemsize] * numbers.size:
            return ((0, bits[numbers.item(0)]),)
        return enumerate([bits[number] for number in numbers.tolist()])

    def _let_go(self, slot: int, entries: Ints) -> None:
        """The slot no longer holds ``entries``; those that are left without a holder become free."""
        before = self._numbers(entries).tolist()
        after = self._sets.take(slot, before)
        self._num_held[slot] -= sum(map(ne, before, after))
        self._holders.reshape(-1)[entries] = after
        free = entries[np.array(after, np.uint32) == 0]
        self._keys.reshape(-1)[free] = 0
        self._used.reshape(-1)[free] = 0
        self.num_entries -= free.size

    def _numbers(self, entries: Ints) -> Numbers:
        return self._holders.reshape(-1).take(entries)

    def _sets_of(self, keys: Words) -> Ints:
        sets = keys >> ONE
        sets &= self._set_mask
        return sets.view(np.int64)

    def _insert(self, keys: Words, ticks: Words, slot: int) -> None:
        """Insert new keys: all at once, except for those of the same set, which take turns."""
        sets = self._sets_of(keys)
        if len(set(sets.tolist())) == sets.size:
            self._put(sets, keys, ticks, slot)
            return
        order = sets.argsort(kind="stable")
        again = np.zeros(order.size, np.bool_)  # whether the one before is in the same set
        np.equal(sets[order[1:]], sets[order[:-1]], out=again[1:])
        places = np.arange(order.size)
        turns = places - np.maximum.accumulate(np.where(again, 0, places))
        for turn in range(int(turns.max()) + 1):
            chosen = order[turns == turn]
            self._put(sets[chosen], keys[chosen], ticks[chosen], slot)

    def _put(self, sets: Ints, keys: Words, ticks: Words, slot: int) -> None:
        """Insert one new key into each of ``sets``: in a free way, or in place of the least recently used entry."""
        all_keys = self._keys.reshape(-1)
        entries = sets * NUM_WAYS + (self._keys.take(sets, axis=0) == 0).argmax(axis=1)
        is_full = all_keys.take(entries) != 0
        if is_full.any():
            entries[is_full] = sets[is_full] * NUM_WAYS + self._used[sets[is_full]].argmin(axis=1)
            evicted = entries[is_full]
            for holders, count in self._sets.drop(self._numbers(evicted).tolist()):
                add(self._num_held, holders, -count)
            self.num_entries -= evicted.size
            self.num_evicted += evicted.size
        self.num_entries += keys.size
        all_keys[entries] = keys
        self._used.reshape(-1)[entries] = ticks
        self._holders.reshape(-1)[entries] = self._sets.of_slot(slot, keys.size)

    def _next_ticks(self, count: int) -> Words:
        """``count`` ticks, the first one the latest."""
        self._tick += count
        return np.arange(self._tick, self._tick - count, -1, dtype=np.uint64)


def _keys_of(block_hashes: Iterable[BlockHash]) -> Words:
    """Eight bytes of each hash, never 0: the probability that any two of a million blocks collide is 5e-8."""
    whole = np.frombuffer(b"".join(block_hashes), np.uint64)
    keys: Words = whole[:: DIGEST_BYTES // 8] | ONE
    return keys


def _different(keys: Words) -> Words:
    """The keys in order, without repetitions: hashes may be forged to share a key."""
    if len(set(keys.tolist())) == keys.size:
        return keys
    return keys[np.sort(np.unique(keys, return_index=True)[1])]


def _leading(rows: Ints) -> int:
    """How many of ``rows``, which ascend, are 0, 1, 2, ... without a gap."""
    if not rows.size or rows.item(-1) == rows.size - 1:
        return rows.size
    return int(np.count_nonzero(rows == np.arange(rows.size)))
