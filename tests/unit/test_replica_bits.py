"""Sets of replicas as bits, compared with counting them one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from shoal_cluster.policies.replica_bits import ALL, add_lengths


@pytest.mark.parametrize("num_words", [1, 2])
@pytest.mark.parametrize("share_that_ends", [0.0, 0.02, 0.5])
def test_lengths_of_a_prompt_looked_up_in_two_parts(num_words: int, share_that_ends: float) -> None:
    """Few and many holders, the same in each row or not; a holder that is back after a gap does not count."""
    for seed in range(20):
        rng = Random(seed)
        num_bits, num_rows, first = num_words * 64, rng.randrange(2, 30), rng.randrange(1, 30)
        holders = {bit for bit in range(num_bits) if rng.random() < (0.03 if seed % 2 else 0.7)}
        rows = [{bit for bit in holders if rng.random() >= share_that_ends} for _ in range(num_rows)]
        bits = [sum(1 << bit for bit in row) for row in rows]
        counts, alive = np.zeros(num_bits, np.int64), ALL
        for part in (bits[:first], bits[first:]):
            changes = [(row, held) for row, held in enumerate(part) if not row or held != part[row - 1] or row % 3]
            if part and alive:
                alive = add_lengths(counts, changes, len(part), alive)
        lengths = [next((i for i, row in enumerate(rows) if bit not in row), num_rows) for bit in range(num_bits)]
        assert counts.tolist() == lengths
        assert alive == sum(1 << bit for bit, length in enumerate(lengths) if length == num_rows)
