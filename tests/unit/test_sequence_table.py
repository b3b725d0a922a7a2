"""The inputs of a step: a sequence has the same ones alone and beside another."""

from __future__ import annotations

from itertools import pairwise

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


def test_sequences_of_an_adapter_are_put_next_to_one_another() -> None:
    table = SequenceTable(max_model_len=48, block_size=16)
    for seq_id, adapter in enumerate(("b", "", "a", "", "b")):
        table.add(NewSequence(seq_id, (1, 2, 3), 3, 0, (seq_id,), SamplingParams(), 0, 0, adapter))
    scheduled = tuple(ScheduledSequence(i, 2, 1, True) for i in range(5))
    ordered = table.by_adapter(scheduled)
    assert [s.seq_id for s in ordered] == [1, 3, 2, 0, 4]
    step = table.arrays(ordered)
    assert step.adapters == ["", "", "a", "b", "b"]
    for seq_id in (0, 2, 4):
        table.drop(seq_id)
    assert table.by_adapter(scheduled) is scheduled
    assert table.arrays((scheduled[1], scheduled[3])).adapters is None


def test_a_draft_has_the_inputs_that_it_will_have_as_a_token() -> None:
    """Each of them a decode of its own, across a block boundary, beside other sequences and adapters."""
    table, later = (SequenceTable(max_model_len=64, block_size=16) for _ in range(2))
    for seq_id, adapter in ((0, ""), (1, "a")):
        for each in (table, later):
            blocks = (10 * seq_id, 10 * seq_id + 1, 10 * seq_id + 2)
            each.add(NewSequence(seq_id, tuple(range(14)), 14, 13, blocks, SamplingParams(), 0, 0, adapter))
    drafts = (41, 42, 43)
    table.propose(1, drafts)
    step = table.arrays((ScheduledSequence(0, 13, 1, True), ScheduledSequence(1, 13, 4, True, 0, drafts)))
    assert step.adapters == ["", "a", "a", "a", "a"]
    assert table.token_ids(1).tolist() == list(range(14))
    assert table.token_ids(1, 2).tolist() == [*range(14), 41, 42]
    for row, (seq_id, position) in enumerate([(0, 13), (1, 13), (1, 14), (1, 15), (1, 16)]):
        alone = later.arrays((ScheduledSequence(seq_id, position, 1, True),))
        assert [step.seq_lens[row]] == alone.seq_lens
        assert step.query_start_loc[row : row + 2] == [row, row + 1]
        width = alone.block_tables.shape[1]
        np.testing.assert_array_equal(step.block_tables[row, :width], alone.block_tables[0])
        for name in ("input_ids", "positions", "slot_mapping"):
            assert getattr(step, name)[row] == getattr(alone, name)[0]
        if seq_id == 1 and position < 16:
            later.append(1, drafts[position - 13])


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_decodes_that_go_on_have_the_inputs_that_they_have_anew(num_seqs: int) -> None:
    """Across block boundaries, a change of a block table, and a sequence that leaves."""
    table, fresh = (SequenceTable(max_model_len=64, block_size=16) for _ in range(2))
    for seq_id in range(num_seqs):
        for each in (table, fresh):
            tokens = tuple(range(100 * seq_id, 100 * seq_id + 10 + seq_id))
            blocks = tuple(10 * seq_id + i for i in range(4))
            each.add(NewSequence(seq_id, tokens, len(tokens), 0, blocks, SamplingParams(), 0))
    steps = []
    for i in range(40):
        if i == 5:
            for each in (table, fresh):
                each.set_blocks(0, 0, (90,))
        if i == 30 and num_seqs > 1:
            table.drop(1)
        seq_ids = [s for s in range(num_seqs) if i < 30 or s != 1]
        for seq_id in seq_ids:
            for each in (table, fresh):
                each.append(seq_id, 1000 * seq_id + i)
        shares = tuple(ScheduledSequence(s, 10 + s + i, 1, True) for s in seq_ids)
        fresh.set_blocks(0, 0, (90,) if i >= 5 else (0,))  # makes it forget the step before
        step, expected = table.arrays(shares), fresh.arrays(shares)
        assert (step.query_start_loc, step.seq_lens) == (expected.query_start_loc, expected.seq_lens)
        for name in ("input_ids", "positions", "block_tables", "slot_mapping"):
            np.testing.assert_array_equal(getattr(step, name), getattr(expected, name))
        steps.append(step)
    assert sum(step is before for before, step in pairwise(steps)) > 20


def test_the_last_sequence_costs_what_the_first_did() -> None:
    """No row is moved when another is taken, and one too many is a bug."""
    table, params = SequenceTable(max_model_len=48, block_size=16, max_num_seqs=40), SamplingParams()
    table.add(NewSequence(0, (1, 2, 3), 3, 0, (0,), params, 0))
    first = table.token_ids(0)
    for seq_id in range(1, 40):
        table.add(NewSequence(seq_id, (seq_id,) * 3, 3, 0, (seq_id,), params, 0))
    assert np.shares_memory(first, table.token_ids(0))
    with pytest.raises(RuntimeError, match="sequence 40: 40 are held already, which is max_num_seqs"):
        table.add(NewSequence(40, (1,), 1, 0, (0,), params, 0))
    table.drop(7)
    table.add(NewSequence(40, (4, 5), 2, 0, (0,), params, 0))
    assert table.token_ids(40).tolist() == [4, 5]
