"""The native table of the prefix index: ``holder_table`` in C++."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.native_library import CCounts, library
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

BITS_PER_BYTE = 8


class NativeTable:
    """Like ``HolderTable``, in half the time; for one thread at a time. They differ in one case: if a call brings more
    than ``NUM_WAYS`` new hashes to one set and some of them share a key, ``HolderTable`` may evict one of them less,
    because it removes repetitions before it inserts anything.

    Raises:
        MemoryError: there is no memory for the table, or for a change or a query of it.
        ValueError: a hash is not of ``DIGEST_BYTES``.
    """

    def __init__(self, max_entries: int) -> None:
        assert library is not None
        self._library = library
        self.max_entries = max_entries
        self._table = library.shoal_table_create(max_entries, DIGEST_BYTES)
        if not self._table:
            raise MemoryError(f"max_entries: got {max_entries}; no memory for so many")
        self._now = CCounts.from_address(library.shoal_table_counts(self._table))
        weakref.finalize(self, library.shoal_table_destroy, self._table)
        self._asked: tuple[Sequence[BlockHash], tuple[bytes, int]] = ((), (b"", 0))
        self._make_counts()

    @property
    def num_entries(self) -> int:
        count: int = self._now.num_entries
        return count

    @property
    def num_evicted(self) -> int:
        count: int = self._now.num_evicted
        return count

    @property
    def num_bytes(self) -> int:
        count: int = self._library.shoal_table_num_bytes(self._table)
        return count

    @property
    def num_slots(self) -> int:
        return self._counts.size

    def num_held(self, slot: int) -> int:
        count: int = self._library.shoal_table_num_held(self._table, slot)
        return count

    def add_slots(self) -> None:
        self._check(self._library.shoal_table_add_slots(self._table))
        self._make_counts()

    def hold(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        self._check(self._library.shoal_table_hold(self._table, slot, *_digests(block_hashes)))

    def release(self, slot: int, block_hashes: Collection[BlockHash]) -> None:
        self._check(self._library.shoal_table_release(self._table, slot, *_digests(block_hashes)))

    def release_all(self, slot: int) -> None:
        self._check(self._library.shoal_table_release_all(self._table, slot))

    def use(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        digests, num_hashes = self._digests_of(block_hashes)
        self._library.shoal_table_use(self._table, digests, num_hashes if count is None else min(count, num_hashes))

    def lengths(self, block_hashes: Sequence[BlockHash], also: Sequence[int] = ()) -> Ints:
        num_bytes = self.num_slots // BITS_PER_BYTE
        bits = b"".join([holders.to_bytes(num_bytes, "little") for holders in also]) if also else None
        digests = self._digests_of(block_hashes)
        self._check(self._library.shoal_table_lengths(self._table, *digests, bits, self._counts_address))
        return self._counts.copy()

    def check_invariants(self, slots: Iterable[int]) -> None:
        fault = self._library.shoal_table_fault(self._table)
        assert fault is None, fault.decode()
        assert {slot for slot in range(self.num_slots) if self.num_held(slot)} <= set(slots)

    def _digests_of(self, block_hashes: Sequence[BlockHash]) -> tuple[bytes, int]:
        """``_digests``. Those of the last tuple are kept: a placement looks its blocks up and then uses them."""
        if block_hashes is self._asked[0]:
            return self._asked[1]
        digests = _digests(block_hashes)
        if isinstance(block_hashes, tuple):
            self._asked = block_hashes, digests
        return digests

    def _make_counts(self) -> None:
        self._counts: Ints = np.zeros(self._library.shoal_table_num_slots(self._table), np.int64)
        self._counts_address = self._counts.ctypes.data

    def _check(self, status: int) -> None:
        if status:
            raise MemoryError("no memory for what a replica caches")


def _digests(block_hashes: Collection[BlockHash]) -> tuple[bytes, int]:
    """The hashes one after another, and how many there are."""
    digests, count = b"".join(block_hashes), len(block_hashes)
    if len(digests) != count * DIGEST_BYTES:
        raise ValueError(f"block_hashes: got {count} of {len(digests)} bytes; must be of {DIGEST_BYTES} each")
    return digests, count
