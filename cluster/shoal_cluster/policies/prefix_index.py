"""Which replicas hold which prefix blocks, as far as the gateway has been told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from shoal_cluster.policies.replica_bits import WORD_BITS, Ints, Words, add_lengths, bit_of, count_bits
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

LOG_WAYS = 5
NUM_WAYS = 1 << LOG_WAYS
CROWDED = 0.25  # of the entries taken: from there on sets begin to fill up
FIRST_LOOK, NEXT_LOOK = 128, 8  # blocks of a prompt looked up at first, and how many times more each time after
DEFAULT_MAX_ENTRIES = 2**21
"""67 MB for up to 64 replicas. Half full, at a million blocks, one entry in 100 000 is forgotten early."""


class Tier(IntEnum):
    """In what way a replica has a block."""

    DEVICE = 0
    """In its pool."""
    EXPECTED = 1
    """It will be there by the time another request gets to it: a prompt on its way there, or being computed, has it."""


class PrefixIndex:
    """Block hash → the replicas that hold it, one bit for each replica and tier.

    A hash covers every token before it, so a flat map is a prefix tree: a prefix is held as far as its hashes are.
    The map is a table like a processor's cache: half of the hash chooses a set of 32 ways, and a newcomer to a full
    set takes the place of its least recently used entry (a forgotten hash only costs a predicted hit, never a wrong
    answer). So memory is fixed, 32 bytes an entry for up to 64 replicas and 16 more for each further 64, and a
    whole prompt or feed message is one pass of array operations. A use is ``store`` or ``touch``; ``match`` only asks.

    Args:
        max_entries: hard cap; rounded up to whole sets, their number a power of two.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}; must be at least 1")
        num_sets = 1 << (-(-max_entries // NUM_WAYS) - 1).bit_length()
        self.max_entries = num_sets * NUM_WAYS
        self.num_evicted = 0
        self._num_changes = 0
        self._num_entries = 0
        self._set_mask = np.uint64(num_sets - 1)
        # The system gives pages of zeros when they are first written, so an empty index takes no memory.
        self._keys: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # 0: the way is free
        self._used: Words = np.zeros((num_sets, NUM_WAYS), np.uint64)  # the tick of the last use
        self._holders: list[Words] = [self._no_holders(1) for _ in Tier]  # of a tier: entry, word of 64 slots
        self._tick = 0
        self._found: _Found | None = None  # by the last question
        self._slot_of: dict[str, int] = {}
        self._num_held: Ints = np.zeros((len(Tier), WORD_BITS), np.int64)  # tier, slot

    def __len__(self) -> int:
        return self._num_entries

    @property
    def version(self) -> int:
        """While it stays the same, so do the answers."""
        return self._num_changes

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._keys.nbytes + self._used.nbytes + sum(holders.nbytes for holders in self._holders)

    def num_held(self, replica_id: str, tier: Tier = Tier.DEVICE) -> int:
        """How many hashes the index knows ``replica_id`` to hold."""
        slot = self._slot_of.get(replica_id)
        return 0 if slot is None else int(self._num_held[tier, slot])

    def replica_ids(self) -> frozenset[str]:
        """Replicas that the index has heard of."""
        return frozenset(self._slot_of)

    def store(self, replica_id: str, block_hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        """``replica_id`` now holds ``block_hashes``, deeper ones last. Storing one twice is once."""
        slot = self._take_slot(replica_id)
        keys = _keys_of(dict.fromkeys(block_hashes))
        if not keys.size:
            return
        self._store(slot, tier, keys, *self._find(keys))

    def extend(self, replica_id: str, block_hashes: Sequence[BlockHash], num_held: int, tier: Tier) -> None:
        """A prompt goes to ``replica_id``, which holds its first ``num_held`` blocks: ``touch`` for these, ``store``
        for the others. What ``match_slots`` has just found of the same prompt is not looked up again.
        """
        slot = self._take_slot(replica_id)
        found = self._found
        if found is None or found.block_hashes is not block_hashes or found.version != self.version:
            keys = _keys_of(block_hashes)
            found = _Found(block_hashes, self.version, keys, *self._find(keys))
        num_head = int(np.count_nonzero(found.rows < num_held))  # rows rise
        if num_head and self._num_entries >= CROWDED * self.max_entries:
            ticks = self._next_ticks(num_held)
            self._used.reshape(-1)[found.entries[:num_head]] = ticks[found.rows[:num_head]]
        rest = found.keys[num_held:]
        if rest.size:
            self._store(slot, tier, rest, found.rows[num_head:] - num_held, found.entries[num_head:])

    def _store(self, slot: int, tier: Tier, keys: Words, rows: Ints, entries: Ints) -> None:
        """``keys``, all different, of which ``_find`` has found ``rows`` in ``entries``."""
        word, bit = slot // WORD_BITS, bit_of(slot)
        self._num_changes += 1
        self._num_held[tier, slot] += keys.size
        ticks = self._next_ticks(keys.size)
        if rows.size:
            holders = self._holders[tier]
            held = holders[entries, word]
            self._num_held[tier, slot] -= np.count_nonzero(held & bit)
            holders[entries, word] = held | bit
            self._used.reshape(-1)[entries] = ticks[rows]
            is_new = np.ones(keys.size, np.bool_)
            is_new[rows] = False
            keys, ticks = keys[is_new], ticks[is_new]
        if keys.size:
            self._insert(keys, ticks, (tier, word), bit)

    def remove(self, replica_id: str, block_hashes: Iterable[BlockHash], tier: Tier = Tier.DEVICE) -> None:
        """``replica_id`` no longer holds ``block_hashes``. What it was not known to hold is ignored."""
        slot = self._slot_of.get(replica_id)
        keys = _keys_of(dict.fromkeys(block_hashes))
        if slot is not None and keys.size:
            self._clear(self._find(keys)[1], slot, tier)

    def drop(self, replica_id: str) -> None:
        """Forget ``replica_id`` and all it holds: one pass over the index."""
        for tier in Tier:
            self._clear_all(replica_id, tier)
        self._slot_of.pop(replica_id, None)

    def replace(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """A snapshot: ``replica_id`` has ``block_hashes`` in its pool and nothing else."""
        self._clear_all(replica_id, Tier.DEVICE)
        self.store(replica_id, block_hashes)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each replica that holds the first block or more, in any tier: how many leading blocks without a hole."""
        counts = self.match_slots(block_hashes).tolist()
        return {replica_id: counts[slot] for replica_id, slot in self._slot_of.items() if counts[slot]}

    def match_slots(self, block_hashes: Sequence[BlockHash]) -> Ints:
        """``match`` as an array, at each replica's ``slot``: shape [slots]."""
        counts: Ints = np.zeros(self._num_held.shape[1], np.int64)
        keys = _keys_of(block_hashes)
        start, stop = 0, FIRST_LOOK
        holders: Words | None = None
        while start < keys.size:
            look = keys[start:stop]
            rows, entries = self._find(look)
            if look.size == keys.size:
                self._found = _Found(block_hashes, self.version, keys, rows, entries)
            if rows.size < look.size:
                entries = entries[: _leading(rows)]  # up to the first hole
                if not entries.size:
                    break
            held = self._held_in_any_tier(entries)
            if holders is not None:
                held[0] &= holders
            np.bitwise_and.accumulate(held, axis=0, out=held)
            add_lengths(counts, held)
            holders = held[-1]
            if entries.size < look.size or not holders.any():
                break
            start, stop = stop, stop * NEXT_LOOK
        return counts

    def slot(self, replica_id: str) -> int:
        """Where ``match_slots`` counts for ``replica_id``; it keeps the place until it is dropped."""
        return self._take_slot(replica_id)

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """``block_hashes`` were used: a prefix loses its tail before its head. While there is much room, who was used
        when does not matter, and nothing is noted.
        """
        keys = _keys_of(block_hashes)
        if keys.size and self._num_entries >= CROWDED * self.max_entries:
            rows, entries = self._find(keys)
            self._used.reshape(-1)[entries] = self._next_ticks(keys.size)[rows]

    def check_invariants(self) -> None:
        """Every entry is in its set, used once and held by known replicas; every count is true; the cap holds."""
        keys = self._keys.reshape(-1)
        taken = np.flatnonzero(keys)
        assert taken.size == self._num_entries <= self.max_entries
        assert np.array_equal(self._sets_of(keys[taken]), taken // NUM_WAYS)
        assert np.unique(keys[taken]).size == taken.size
        assert self._held_in_any_tier(taken).any(axis=1).all()
        assert np.array_equal(np.flatnonzero(self._used), taken)
        held = [holders.any(axis=1) for holders in self._holders]
        assert np.count_nonzero(np.logical_or.reduce(held)) == taken.size
        counts = self._num_held_by(taken)
        assert np.array_equal(counts, self._num_held)
        assert set(np.flatnonzero(counts.any(axis=0)).tolist()) <= set(self._slot_of.values())
        assert len(set(self._slot_of.values())) == len(self._slot_of)

    def _find(self, keys: Words) -> tuple[Ints, Ints]:
        """Which of ``keys`` are known, by place in ``keys`` and rising, and the entry of each."""
        sets = self._sets_of(keys)
        hits: Ints = (self._keys.take(sets, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        rows = hits >> LOG_WAYS
        if rows.size != keys.size:
            sets = sets[rows]
        return rows, (sets << LOG_WAYS) + (hits & (NUM_WAYS - 1))

    def _sets_of(self, keys: Words) -> Ints:
        sets: Ints = ((keys >> np.uint64(1)) & self._set_mask).view(np.int64)
        return sets

    def _insert(self, keys: Words, ticks: Words, place: tuple[int, int], bit: np.uint64) -> None:
        """Put new keys in: all at once, but for those of the same set, which take turns."""
        sets = self._sets_of(keys)
        if len(set(sets.tolist())) == sets.size:
            self._put(sets, keys, ticks, place, bit)
            return
        order = sets.argsort(kind="stable")
        again = np.zeros(order.size, np.bool_)  # whether the one before is of the same set
        np.equal(sets[order[1:]], sets[order[:-1]], out=again[1:])
        places = np.arange(order.size)
        turns = places - np.maximum.accumulate(np.where(again, 0, places))
        for turn in range(int(turns.max()) + 1):
            chosen = order[turns == turn]
            self._put(sets[chosen], keys[chosen], ticks[chosen], place, bit)

    def _put(self, sets: Ints, keys: Words, ticks: Words, place: tuple[int, int], bit: np.uint64) -> None:
        """Put one new key into each of ``sets``, in the place of what was used least recently."""
        all_keys = self._keys.reshape(-1)
        entries = sets * NUM_WAYS + (self._keys.take(sets, axis=0) == 0).argmax(axis=1)
        is_full = all_keys.take(entries) != 0
        if is_full.any():
            entries[is_full] = sets[is_full] * NUM_WAYS + self._used[sets[is_full]].argmin(axis=1)
            evicted = entries[is_full]
            self._num_held -= self._num_held_by(evicted)
            for holders in self._holders:
                holders[evicted] = 0
            self._num_entries -= evicted.size
            self.num_evicted += evicted.size
        self._num_entries += keys.size
        all_keys[entries] = keys
        self._used.reshape(-1)[entries] = ticks
        tier, word = place
        self._holders[tier][entries, word] = bit

    def _no_holders(self, num_words: int) -> Words:
        return np.zeros((self.max_entries, num_words), np.uint64)

    def _held_in_any_tier(self, entries: Ints) -> Words:
        """Who holds ``entries`` [n, words]."""
        held = self._holders[Tier.DEVICE].take(entries, axis=0)
        held |= self._holders[Tier.EXPECTED].take(entries, axis=0)
        return held

    def _num_held_by(self, entries: Ints) -> Ints:
        """How many of ``entries`` each slot holds [tiers, slots]."""
        return np.stack([count_bits(holders[entries]) for holders in self._holders])

    def _clear_all(self, replica_id: str, tier: Tier) -> None:
        if self.num_held(replica_id, tier):
            slot = self._slot_of[replica_id]
            self._clear(np.flatnonzero(self._holders[tier][:, slot // WORD_BITS] & bit_of(slot)), slot, tier)

    def _clear(self, entries: Ints, slot: int, tier: Tier) -> None:
        """``slot`` holds ``entries`` in this tier no longer; those that nobody holds are free."""
        self._num_changes += 1
        word, bit = slot // WORD_BITS, bit_of(slot)
        holders = self._holders[tier]
        held = holders[entries, word]
        self._num_held[tier, slot] -= np.count_nonzero(held & bit)
        holders[entries, word] = held & ~bit
        free = entries[~self._held_in_any_tier(entries).any(axis=1)]
        self._keys.reshape(-1)[free] = 0
        self._used.reshape(-1)[free] = 0
        self._num_entries -= free.size

    def _next_ticks(self, count: int) -> Words:
        """One tick each, the first the latest."""
        self._tick += count
        return np.arange(self._tick, self._tick - count, -1, dtype=np.uint64)

    def _add_words(self) -> None:
        """Make room for twice the slots. Only entries in use are copied: what is never written takes no memory."""
        num_words = self._holders[0].shape[1]
        taken = np.flatnonzero(self._keys.reshape(-1))
        for tier, before in enumerate(self._holders):
            holders = self._no_holders(2 * num_words)
            holders[taken, :num_words] = before[taken]
            self._holders[tier] = holders

    def _take_slot(self, replica_id: str) -> int:
        slot = self._slot_of.get(replica_id)
        if slot is None:
            taken = set(self._slot_of.values())
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            self._slot_of[replica_id] = slot
            if slot >= self._num_held.shape[1]:
                self._add_words()
                self._num_held = np.concatenate([self._num_held, np.zeros_like(self._num_held)], axis=1)
        return slot


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What ``_find`` found of a prompt's ``keys`` while the index was at ``version``."""

    block_hashes: Sequence[BlockHash]
    version: int
    keys: Words
    rows: Ints
    entries: Ints


def _keys_of(block_hashes: Iterable[BlockHash]) -> Words:
    """Eight bytes of each hash, never 0: two of a million blocks meet with a chance of 5e-8."""
    whole = np.frombuffer(b"".join(block_hashes), np.uint64)
    keys: Words = whole[:: DIGEST_BYTES // 8] | np.uint64(1)
    return keys


def _leading(rows: Ints) -> int:
    """How many of ``rows``, which rise, are 0, 1, 2, ... without a hole."""
    return int(np.count_nonzero(rows == np.arange(rows.size)))
