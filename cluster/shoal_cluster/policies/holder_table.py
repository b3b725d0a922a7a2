"""The table of the prefix index: keys, each in its set of ways, and the slots that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import eq, ne

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.holder_sets import HolderSets
from shoal_cluster.policies.replica_bits import Changes, Ints, add

Words = NDArray[np.uint64]
Numbers = NDArray[np.uint32]
Bools = NDArray[np.bool_]

LOG_WAYS = 5
NUM_WAYS = 1 << LOG_WAYS
ONE, SET_SHIFT, WAY_MASK = np.array(1, np.uint64), np.array(LOG_WAYS), np.array(NUM_WAYS - 1)  # soonest as arrays
FIRST_SLOTS = 64


class HolderTable:
    """Key → the slots that hold it, as the number of a ``HolderSets``; a key that nobody holds is not there.

    Laid out like a processor's cache: a part of the key chooses a set of 32 ways, and a newcomer to a full set takes
    the place of its least recently used entry. Many keys are looked up at once, in a pass of array operations; a few
    one by one, which is the same sooner. Keys are odd: 0 is a free way.

    Attributes:
        num_held: keys that each slot holds [slots].
        num_evicted: entries that had to go for others.

    Args:
        max_entries: hard cap; rounded up to whole sets, their number a power of two.
    """

    def __init__(self, max_entries: int) -> None:
        num_sets = 1 << (-(-max_entries // NUM_WAYS) - 1).bit_length()
        self.max_entries = num_sets * NUM_WAYS
        self.num_entries = 0
        self.num_evicted = 0
        self.num_held: Ints = np.zeros(FIRST_SLOTS, np.int64)
        self._last_set = num_sets - 1
        self._set_mask = np.array(self._last_set, np.uint64)
        # The system gives pages of zeros when they are first written, so an empty table takes no memory.
        self._keys: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # 0: the way is free
        self._used: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # the tick of the last use
        self._holders: Numbers = np.zeros((num_sets, NUM_WAYS), np.uint32)  # in ``_sets``; 0 of a free way
        self._sets = HolderSets()
        self._tick = 0
        # The same memory, one element at a time.
        self._each_key, self._each_used = self._keys.reshape(-1).data, self._used.reshape(-1).data
        self._each_holders = self._holders.reshape(-1).data

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._used.nbytes + self._holders.nbytes + self._sets.num_bytes

    def add_slots(self) -> None:
        """Make room for twice the slots."""
        self.num_held = np.concatenate([self.num_held, np.zeros_like(self.num_held)])

    # Many keys

    def find(self, keys: Words) -> tuple[Ints, Ints]:
        """Which of ``keys`` are known, by place in ``keys`` and rising, and the entry of each."""
        sets = self._sets_of(keys)
        hits: Ints = (self._keys.take(sets, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        rows = hits >> SET_SHIFT
        if rows.size != keys.size:
            sets = sets.take(rows)
        entries = sets << SET_SHIFT
        entries += hits & WAY_MASK
        return rows, entries

    def holders(self, entries: Ints) -> list[int]:
        """Who holds each, as bits."""
        bits = self._sets.bits
        return [bits[number] for number in self._numbers(entries).tolist()]

    def holder_changes(self, entries: Ints) -> Changes:
        """The same as (row, bits), without rows that are certain to have the bits of the row before."""
        numbers, bits = self._numbers(entries), self._sets.bits
        whole = numbers.tobytes()
        if whole == whole[: numbers.itemsize] * numbers.size:
            return ((0, bits[numbers.item(0)]),)
        return enumerate([bits[number] for number in numbers.tolist()])

    def is_held(self, entries: Ints, slot: int) -> Bools:
        """Which of ``entries`` the slot holds."""
        numbers, bits = self._numbers(entries).tolist(), self._sets.bits
        is_in = {number: bits[number] >> slot & 1 for number in set(numbers)}
        if len(is_in) == 1:
            return np.full(entries.size, is_in[numbers[0]], np.bool_)
        return np.array([is_in[number] for number in numbers], np.bool_)

    def held_by(self, slot: int) -> Ints:
        """Entries that the slot holds: one pass over the table."""
        is_with: Bools = np.array(self._sets.with_slot(slot))
        return np.flatnonzero(is_with.take(self._holders))

    def hold(self, slot: int, keys: Words, rows: Ints, entries: Ints) -> None:
        """The slot holds ``keys``, all different, of which ``find`` has found ``rows`` in ``entries``."""
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
        self.num_held[slot] += num_new
        if keys.size:
            self._insert(keys, ticks, slot)

    def release(self, slot: int, entries: Ints) -> None:
        """The slot holds ``entries`` no longer; those that nobody holds are free."""
        before = self._numbers(entries).tolist()
        after = self._sets.take(slot, before)
        self.num_held[slot] -= sum(map(ne, before, after))
        self._holders.reshape(-1)[entries] = after
        free = entries[np.array(after, np.uint32) == 0]
        self._keys.reshape(-1)[free] = 0
        self._used.reshape(-1)[free] = 0
        self.num_entries -= free.size

    def use(self, entries: Ints, rows: Ints | None, count: int) -> None:
        """``count`` keys were used, the first the latest; those known are ``rows`` of them, all unless given."""
        ticks = self._next_ticks(count)
        self._used.reshape(-1)[entries] = ticks if rows is None else ticks[rows]

    # A few keys

    def is_held_at(self, slot: int, key: int) -> bool:
        """Whether the slot holds ``key``."""
        entry = self._entry_of(key)
        return entry >= 0 and bool(self._sets.bits[self._each_holders[entry]] >> slot & 1)

    def hold_few(self, slot: int, keys: Sequence[int]) -> None:
        """``hold`` for keys that are still to be found."""
        tick = self._tick = self._tick + len(keys)
        num_new, new = len(keys), []
        for key in keys:
            entry = self._entry_of(key)
            if entry < 0:
                new.append((key, tick))
            else:
                before = self._each_holders[entry]
                after = self._sets.add_one(slot, before)
                num_new -= before == after
                self._each_holders[entry], self._each_used[entry] = after, tick
            tick -= 1
        self.num_held[slot] += num_new
        for key, tick in new:
            first = (key >> 1 & self._last_set) << LOG_WAYS
            ways = self._each_key[first : first + NUM_WAYS].tolist()
            if 0 in ways:
                entry = first + ways.index(0)
                self._each_key[entry], self._each_used[entry] = key, tick
                self._each_holders[entry] = self._sets.of_slot(slot, 1)
                self.num_entries += 1
            else:
                self._insert(np.array([key], np.uint64), np.array([tick], np.uint64), slot)

    def release_few(self, slot: int, keys: Iterable[int]) -> None:
        """``release`` for keys that are still to be found."""
        for key in keys:
            entry = self._entry_of(key)
            if entry < 0:
                continue
            before = self._each_holders[entry]
            after = self._sets.take_one(slot, before)
            self._each_holders[entry] = after
            self.num_held[slot] -= before != after
            if not after:
                self._each_key[entry] = self._each_used[entry] = 0
                self.num_entries -= 1

    def check_invariants(self, slots: Iterable[int]) -> None:
        """Every entry is in its set, used once and held by ``slots``; every count is true; the cap holds."""
        keys = self._keys.reshape(-1)
        taken = np.flatnonzero(keys)
        assert taken.size == self.num_entries <= self.max_entries
        assert np.array_equal(self._sets_of(keys[taken]), taken // NUM_WAYS)
        assert np.unique(keys[taken]).size == taken.size
        assert np.array_equal(np.flatnonzero(self._used), taken)
        assert np.array_equal(np.flatnonzero(self._holders), taken)
        self._sets.check_invariants(self._numbers(taken).tolist())
        counts = np.zeros_like(self.num_held)
        for held in self.holders(taken):
            add(counts, held, 1)
        assert np.array_equal(counts, self.num_held)
        assert set(np.flatnonzero(counts).tolist()) <= set(slots)

    def _entry_of(self, key: int) -> int:
        """-1: it is not there."""
        first = (key >> 1 & self._last_set) << LOG_WAYS
        ways = self._each_key[first : first + NUM_WAYS].tolist()
        return first + ways.index(key) if key in ways else -1

    def _numbers(self, entries: Ints) -> Numbers:
        return self._holders.reshape(-1).take(entries)

    def _sets_of(self, keys: Words) -> Ints:
        sets = keys >> ONE
        sets &= self._set_mask
        return sets.view(np.int64)

    def _insert(self, keys: Words, ticks: Words, slot: int) -> None:
        """Put new keys in: all at once, but for those of the same set, which take turns."""
        sets = self._sets_of(keys)
        if len(set(sets.tolist())) == sets.size:
            self._put(sets, keys, ticks, slot)
            return
        order = sets.argsort(kind="stable")
        again = np.zeros(order.size, np.bool_)  # whether the one before is of the same set
        np.equal(sets[order[1:]], sets[order[:-1]], out=again[1:])
        places = np.arange(order.size)
        turns = places - np.maximum.accumulate(np.where(again, 0, places))
        for turn in range(int(turns.max()) + 1):
            chosen = order[turns == turn]
            self._put(sets[chosen], keys[chosen], ticks[chosen], slot)

    def _put(self, sets: Ints, keys: Words, ticks: Words, slot: int) -> None:
        """Put one new key into each of ``sets``, in the place of what was used least recently."""
        all_keys = self._keys.reshape(-1)
        entries = sets * NUM_WAYS + (self._keys.take(sets, axis=0) == 0).argmax(axis=1)
        is_full = all_keys.take(entries) != 0
        if is_full.any():
            entries[is_full] = sets[is_full] * NUM_WAYS + self._used[sets[is_full]].argmin(axis=1)
            evicted = entries[is_full]
            for holders, count in self._sets.drop(self._numbers(evicted).tolist()):
                add(self.num_held, holders, -count)
            self.num_entries -= evicted.size
            self.num_evicted += evicted.size
        self.num_entries += keys.size
        all_keys[entries] = keys
        self._used.reshape(-1)[entries] = ticks
        self._holders.reshape(-1)[entries] = self._sets.of_slot(slot, keys.size)

    def _next_ticks(self, count: int) -> Words:
        """One tick each, the first the latest."""
        self._tick += count
        return np.arange(self._tick, self._tick - count, -1, dtype=np.uint64)
