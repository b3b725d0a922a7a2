"""Sets of replicas as bits: words of 64, bit i for the replica in slot i."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

WORD_BITS = 64
FEW = 8  # bits that are sooner counted one by one


def add_lengths(counts: Ints, held: Words) -> None:
    """Add to each bit's count the number of rows of ``held`` [n, words] that have it; a bit that ends stays away."""
    last = [held.shape[0] - 1]
    changes = held[1:] != held[:-1]  # holders drop out on the way: each distinct row counts as often as it comes
    if np.count_nonzero(changes):
        rows = changes.reshape(-1) if held.shape[1] == 1 else changes.any(axis=1)
        last = [*rows.nonzero()[0].tolist(), *last]
    before = -1
    for row in last:
        length, holders = row - before, int.from_bytes(held[row].tobytes(), "little")
        before = row
        if holders.bit_count() <= FEW:
            while holders:
                lowest = holders & -holders
                counts[lowest.bit_length() - 1] += length
                holders ^= lowest
        else:
            counts += length * np.unpackbits(held[row].view(np.uint8), bitorder="little").astype(np.int64)


def bit_of(slot: int) -> np.uint64:
    return np.uint64(1 << slot % WORD_BITS)


def count_bits(holders: Words) -> Ints:
    """How often each bit is set: [n, words] → [words * 64]."""
    counts: Ints = np.unpackbits(holders.view(np.uint8), axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
    return counts
