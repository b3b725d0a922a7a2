"""Which replicas hold which prefix blocks, as far as the gateway has been told."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.expected_blocks import ExpectedBlocks
from shoal_cluster.policies.replica_bits import ALL, WORD_BITS, Ints, Words, add_lengths, bit_of, count_bits
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

LOG_WAYS = 5
NUM_WAYS = 1 << LOG_WAYS
ONE, SET_SHIFT, WAY_MASK = np.array(1, np.uint64), np.array(LOG_WAYS), np.array(NUM_WAYS - 1)  # soonest as arrays
CROWDED = 0.25  # of the entries taken: from there on sets begin to fill up
FIRST_LOOK, NEXT_LOOK = 128, 8  # blocks of a prompt looked up at first, and how many times more each time after
DEFAULT_MAX_ENTRIES = 2**21
"""50 MB for up to 64 replicas. Half full, at a million blocks, one entry in 100 000 is forgotten early."""


class PrefixIndex:
    """Block hash → the replicas that hold it, one bit for each replica; beside it, ``expected``: what they will hold.

    A hash covers every token before it, so a flat map is a prefix tree: a prefix is held as far as its hashes are.
    The map is a table like a processor's cache: half of the hash chooses a set of 32 ways, and a newcomer to a full
    set takes the place of its least recently used entry (a forgotten hash only costs a predicted hit, never a wrong
    answer). So memory is fixed, 24 bytes an entry for up to 64 replicas and 8 more for each further 64, and a
    whole prompt or feed message is one pass of array operations. A use is ``store`` or ``touch``; ``match`` only asks.

    Attributes:
        is_by_replica: news of one replica change the answers for that one alone, as long as nothing is evicted.

    Args:
        max_entries: hard cap; rounded up to whole sets, their number a power of two.
    """

    is_by_replica = True

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}; must be at least 1")
        num_sets = 1 << (-(-max_entries // NUM_WAYS) - 1).bit_length()
        self.max_entries = num_sets * NUM_WAYS
        self.num_evicted = 0
        self._num_changes = 0
        self._num_entries = 0
        self._set_mask = np.array(num_sets - 1, np.uint64)
        # The system gives pages of zeros when they are first written, so an empty index takes no memory.
        self._keys: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # 0: the way is free
        self._used: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # the tick of the last use
        self._holders = self._no_holders(1)  # entry, word of 64 slots
        self._tick = 0
        self._found: _Found | None = None  # by the last question
        self._slot_of: dict[str, int] = {}
        self._num_held: Ints = np.zeros(WORD_BITS, np.int64)  # by slot
        self.expected = ExpectedBlocks()

    def __len__(self) -> int:
        return self._num_entries

    @property
    def version(self) -> int:
        """While it stays the same, so do the answers."""
        return self._num_changes + self.expected.num_changes

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._keys.nbytes + self._used.nbytes + self._holders.nbytes

    def num_held(self, replica_id: str) -> int:
        """How many hashes the index knows ``replica_id`` to hold."""
        slot = self._slot_of.get(replica_id)
        return 0 if slot is None else int(self._num_held[slot])

    def replica_ids(self) -> frozenset[str]:
        """Replicas that the index has heard of."""
        return frozenset(self._slot_of)

    def store(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` now holds ``block_hashes``, deeper ones last. Storing one twice is once."""
        slot = self._take_slot(replica_id)
        keys = _keys_of(dict.fromkeys(block_hashes))
        if keys.size:
            self._store(slot, keys, *self._find(keys))

    def expect(self, replica_id: str, block_hashes: Sequence[BlockHash], num_held: int) -> Sequence[BlockHash]:
        """A prompt goes to ``replica_id``, which holds its first ``num_held`` blocks: these are used, the others are
        expected there, and returned. Each is until ``expected.remove`` takes it away at the ``slot``.
        """
        self.touch(block_hashes, num_held)
        rest = block_hashes[num_held:]
        self.expected.add(self._take_slot(replica_id), rest)
        return rest

    def _store(self, slot: int, keys: Words, rows: Ints, entries: Ints) -> None:
        """``keys``, all different, of which ``_find`` has found ``rows`` in ``entries``."""
        word, bit = slot // WORD_BITS, bit_of(slot)
        self._num_changes += 1
        num_new = keys.size
        ticks = self._next_ticks(keys.size)
        if rows.size:
            held = self._holders[entries, word]
            num_new -= int(np.count_nonzero(held & bit))
            self._holders[entries, word] = held | bit
            self._used.reshape(-1)[entries] = ticks[rows]
            is_new = np.ones(keys.size, np.bool_)
            is_new[rows] = False
            keys, ticks = keys[is_new], ticks[is_new]
        self._num_held[slot] += num_new
        if keys.size:
            self._insert(keys, ticks, word, bit)

    def change(self, replica_id: str, stored: Collection[BlockHash], removed: Collection[BlockHash]) -> None:
        """``remove``, then ``store``; no hash is in both. Looked up at once."""
        slot, gone = self._take_slot(replica_id), dict.fromkeys(removed)
        keys = _keys_of(itertools.chain(gone, dict.fromkeys(stored)))
        rows, entries = self._find(keys)
        num_known = int(np.count_nonzero(rows < len(gone)))  # rows rise
        if gone:
            self._clear(entries[:num_known], slot)
        if keys.size > len(gone):
            self._store(slot, keys[len(gone) :], rows[num_known:] - len(gone), entries[num_known:])

    def remove(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` no longer holds ``block_hashes``. What it was not known to hold is ignored."""
        slot = self._slot_of.get(replica_id)
        keys = _keys_of(dict.fromkeys(block_hashes))
        if slot is not None and keys.size:
            self._clear(self._find(keys)[1], slot)

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
        counts: Ints = np.zeros(self._num_held.size, np.int64)
        keys = _keys_of(block_hashes)
        is_expected = self.expected.has_any(block_hashes)
        start, stop = 0, FIRST_LOOK
        alive = ALL  # who has all so far
        while start < keys.size:
            look = keys[start:stop]
            rows, entries = self._find(look)
            num_leading = _leading(rows)
            if look.size == keys.size:
                self._found = _Found(block_hashes, self._num_changes, rows, entries, num_leading)
            if is_expected:
                held = self.expected.rows(block_hashes[start:stop], self._holders.shape[1])
                held[rows] |= self._holders.take(entries, axis=0)
            else:
                if not num_leading:
                    break
                held = self._holders.take(entries[:num_leading], axis=0)  # up to the first hole
            alive = add_lengths(counts, held, alive)
            if len(held) < look.size or not alive:
                break
            start, stop = stop, stop * NEXT_LOOK
        return counts

    def match_slot(self, slot: int, block_hashes: Sequence[BlockHash]) -> int:
        """``match_slots`` at one ``slot``."""
        rows, entries = self._find(_keys_of(block_hashes))
        rows = rows[(self._holders[entries, slot // WORD_BITS] & bit_of(slot)) != 0]
        count = _leading(rows)
        if self.expected.is_at(slot, block_hashes[count : count + 1]):
            held = set(rows.tolist())
            while count < len(block_hashes) and (
                count in held or self.expected.is_at(slot, block_hashes[count : count + 1])
            ):
                count += 1
        return count

    def slot(self, replica_id: str) -> int:
        """Where ``match_slots`` counts for ``replica_id``; it keeps the place until it is dropped."""
        return self._take_slot(replica_id)

    def touch(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        """The first ``count`` of ``block_hashes``, all unless given, were used: a prefix loses its tail before its
        head. While there is much room, who was used when does not matter, and nothing is noted. What ``match_slots``
        has just found of the same prompt is not looked up again.
        """
        if self._num_entries < CROWDED * self.max_entries or not block_hashes:
            return
        count = len(block_hashes) if count is None else count
        found = self._found
        if found is not None and found.block_hashes is block_hashes and found.num_changes == self._num_changes:
            if count <= found.num_leading:
                self._used.reshape(-1)[found.entries[:count]] = self._next_ticks(count)
                return
            num_known = int(np.count_nonzero(found.rows < count))  # rows rise
            rows, entries = found.rows[:num_known], found.entries[:num_known]
        else:
            rows, entries = self._find(_keys_of(block_hashes[:count]))
        self._used.reshape(-1)[entries] = self._next_ticks(count)[rows]

    def check_invariants(self) -> None:
        """Every entry is in its set, used once and held by known replicas; every count is true; the cap holds."""
        keys = self._keys.reshape(-1)
        taken = np.flatnonzero(keys)
        assert taken.size == self._num_entries <= self.max_entries
        assert np.array_equal(self._sets_of(keys[taken]), taken // NUM_WAYS)
        assert np.unique(keys[taken]).size == taken.size
        assert np.array_equal(np.flatnonzero(self._used), taken)
        assert np.array_equal(np.flatnonzero(self._holders.any(axis=1)), taken)
        counts = count_bits(self._holders[taken])
        assert np.array_equal(counts, self._num_held)
        assert set(np.flatnonzero(counts).tolist()) <= set(self._slot_of.values())
        assert len(set(self._slot_of.values())) == len(self._slot_of)

    def _find(self, keys: Words) -> tuple[Ints, Ints]:
        """Which of ``keys`` are known, by place in ``keys`` and rising, and the entry of each."""
        sets = self._sets_of(keys)
        hits: Ints = (self._keys.take(sets, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        rows = hits >> SET_SHIFT
        if rows.size != keys.size:
            sets = sets.take(rows)
        entries = sets << SET_SHIFT
        entries += hits & WAY_MASK
        return rows, entries

    def _sets_of(self, keys: Words) -> Ints:
        sets = keys >> ONE
        sets &= self._set_mask
        return sets.view(np.int64)

    def _insert(self, keys: Words, ticks: Words, word: int, bit: np.uint64) -> None:
        """Put new keys in: all at once, but for those of the same set, which take turns."""
        sets = self._sets_of(keys)
        if len(set(sets.tolist())) == sets.size:
            self._put(sets, keys, ticks, word, bit)
            return
        order = sets.argsort(kind="stable")
        again = np.zeros(order.size, np.bool_)  # whether the one before is of the same set
        np.equal(sets[order[1:]], sets[order[:-1]], out=again[1:])
        places = np.arange(order.size)
        turns = places - np.maximum.accumulate(np.where(again, 0, places))
        for turn in range(int(turns.max()) + 1):
            chosen = order[turns == turn]
            self._put(sets[chosen], keys[chosen], ticks[chosen], word, bit)

    def _put(self, sets: Ints, keys: Words, ticks: Words, word: int, bit: np.uint64) -> None:
        """Put one new key into each of ``sets``, in the place of what was used least recently."""
        all_keys = self._keys.reshape(-1)
        entries = sets * NUM_WAYS + (self._keys.take(sets, axis=0) == 0).argmax(axis=1)
        is_full = all_keys.take(entries) != 0
        if is_full.any():
            entries[is_full] = sets[is_full] * NUM_WAYS + self._used[sets[is_full]].argmin(axis=1)
            evicted = entries[is_full]
            self._num_held -= count_bits(self._holders[evicted])
            self._holders[evicted] = 0
            self._num_entries -= evicted.size
            self.num_evicted += evicted.size
        self._num_entries += keys.size
        all_keys[entries] = keys
        self._used.reshape(-1)[entries] = ticks
        self._holders[entries, word] = bit

    def _no_holders(self, num_words: int) -> Words:
        return np.zeros((self.max_entries, num_words), np.uint64)

    def _clear_all(self, replica_id: str) -> None:
        if self.num_held(replica_id):
            slot = self._slot_of[replica_id]
            self._clear(np.flatnonzero(self._holders[:, slot // WORD_BITS] & bit_of(slot)), slot)

    def _clear(self, entries: Ints, slot: int) -> None:
        """``slot`` holds ``entries`` no longer; those that nobody holds are free."""
        self._num_changes += 1
        word, bit = slot // WORD_BITS, bit_of(slot)
        held = self._holders[entries, word]
        self._num_held[slot] -= np.count_nonzero(held & bit)
        held &= ~bit
        self._holders[entries, word] = held
        if self._holders.shape[1] > 1:
            held = np.bitwise_or.reduce(self._holders.take(entries, axis=0), axis=1)
        free = entries[held == 0]
        self._keys.reshape(-1)[free] = 0
        self._used.reshape(-1)[free] = 0
        self._num_entries -= free.size

    def _next_ticks(self, count: int) -> Words:
        """One tick each, the first the latest."""
        self._tick += count
        return np.arange(self._tick, self._tick - count, -1, dtype=np.uint64)

    def _add_words(self) -> None:
        """Make room for twice the slots. Only entries in use are copied: what is never written takes no memory."""
        num_words = self._holders.shape[1]
        taken = np.flatnonzero(self._keys.reshape(-1))
        holders = self._no_holders(2 * num_words)
        holders[taken, :num_words] = self._holders[taken]
        self._holders = holders

    def _take_slot(self, replica_id: str) -> int:
        slot = self._slot_of.get(replica_id)
        if slot is None:
            taken = set(self._slot_of.values())
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            self._slot_of[replica_id] = slot
            if slot >= self._num_held.size:
                self._add_words()
                self._num_held = np.concatenate([self._num_held, np.zeros_like(self._num_held)])
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


def _leading(rows: Ints) -> int:
    """How many of ``rows``, which rise, are 0, 1, 2, ... without a hole."""
    if not rows.size or rows.item(-1) == rows.size - 1:
        return rows.size
    return int(np.count_nonzero(rows == np.arange(rows.size)))
