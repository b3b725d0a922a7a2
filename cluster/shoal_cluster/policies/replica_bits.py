"""Sets of replicas as bits: bit i for the replica in slot i."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.columns import Ints

Bools = NDArray[np.bool_]
Changes = Iterable[tuple[int, int]]
"""Row numbers, ascending, with the bits of each; a row that is left out has those of the row before."""

ALL = -1  # all bits set
FEW = 8  # up to so many bits are faster counted one by one


def add_lengths(counts: Ints, held: Changes, num_rows: int, alive: int) -> int:
    """Add to the count of each bit in ``alive`` how many of ``num_rows`` rows have it up to the first that does not.
    Returns the bits that all rows have.
    """
    for row, holders in held:
        left = alive & holders
        if left != alive:
            if row:
                add(counts, alive ^ left, row)
            alive = left
            if not alive:
                return 0
    add(counts, alive, num_rows)
    return alive


def add(counts: Ints, bits: int, count: int) -> None:
    """Add ``count`` at each of ``bits``. The number of ``counts`` is a multiple of eight."""
    if bits.bit_count() <= FEW:
        while bits:
            lowest = bits & -bits
            counts[lowest.bit_length() - 1] += count
            bits ^= lowest
    else:
        each = np.frombuffer(bits.to_bytes(counts.size // 8, "little"), np.uint8)
        counts += count * np.unpackbits(each, bitorder="little").astype(np.int64)
