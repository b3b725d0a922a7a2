"""Sets of replicas as bits: words of 64, bit i for the replica in slot i."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

WORD_BITS = 64
ALL = -1  # bits
FEW = 8  # bits that are sooner counted one by one


def add_lengths(counts: Ints, held: Words, alive: int) -> int:
    """Add to the count of each bit in ``alive`` the number of rows of ``held`` [n, words] that have it; a bit that ends
    stays away. Returns the bits that are left.
    """
    changes: Iterable[tuple[int, int]]  # rows in which bits may end, and what they have
    whole = held.tobytes()
    first = whole[: len(whole) // len(held)]
    if whole == first * len(held):
        changes = ((0, int.from_bytes(first, "little")),)
    elif held.shape[1] == 1:
        changes = enumerate(held.reshape(-1).tolist())
    else:
        size = len(first)
        changes = ((row, int.from_bytes(whole[row * size : (row + 1) * size], "little")) for row in range(len(held)))
    for row, holders in changes:
        left = alive & holders
        if left != alive:
            if row:
                _add(counts, alive ^ left, row)
            alive = left
            if not alive:
                return 0
    _add(counts, alive, held.shape[0])
    return alive


def _add(counts: Ints, holders: int, length: int) -> None:
    if holders.bit_count() <= FEW:
        while holders:
            lowest = holders & -holders
            counts[lowest.bit_length() - 1] += length
            holders ^= lowest
    else:
        each = np.frombuffer(holders.to_bytes(counts.size // 8, "little"), np.uint8)
        counts += length * np.unpackbits(each, bitorder="little").astype(np.int64)


def bit_of(slot: int) -> np.uint64:
    return np.uint64(1 << slot % WORD_BITS)


def count_bits(holders: Words) -> Ints:
    """How often each bit is set: [n, words] → [words * 64]."""
    counts: Ints = np.unpackbits(holders.view(np.uint8), axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
    return counts
