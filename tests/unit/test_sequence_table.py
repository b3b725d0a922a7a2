"""The inputs of a step: a sequence gets the same alone and beside another."""

from __future__ import annotations

import numpy as np
import pytest

from shoal_replica.executor import NewSequence, ScheduledSequence
from shoal_replica.model.sequence_table import SequenceTable
from shoal_replica.sampling_params import SamplingParams


@pytest.mark.parametrize("position", [0, 15, 16, 38])
def test_a_lone_decode_has_the_inputs_that_it_has_beside_another(position: int) -> None:
    table = SequenceTable(max_model_len=48, block_size=16)
    for seq_id in (0, 1):
        blocks = tuple(10 * (seq_id + 1) + i for i in range(3))
        tokens = tuple(range(100 * seq_id, 100 * seq_id + 39))
        table.add(NewSequence(seq_id, tokens, 39, position, blocks, SamplingParams(), 0))
    share = ScheduledSequence(1, position, 1, True)
    alone = table.arrays((share,))
    both = table.arrays((share, ScheduledSequence(0, position, 1, True)))
    assert alone.query_start_loc == both.query_start_loc[:2]
    assert alone.seq_lens == both.seq_lens[:1]
    for name in ("input_ids", "positions", "block_tables", "slot_mapping"):
        mine, beside = getattr(alone, name), getattr(both, name)[:1]
        assert mine.dtype == beside.dtype
        np.testing.assert_array_equal(mine, beside)
