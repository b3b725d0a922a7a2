"""The runner's copy of its sequences: tokens and block ids in host arrays, from which a step's inputs are gathered."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_replica.config import DEFAULT_NUM_SEQS
from shoal_replica.executor import NewSequence, ScheduledSequence
from shoal_replica.sampling_params import SamplingParams

Integer = TypeVar("Integer", np.int64, np.int32)


@dataclass(slots=True)
class RunnerSequence:
    """A sequence and the row of the table that holds its tokens and block ids."""

    row: int
    num_tokens: int
    num_prompt_tokens: int
    sampling_params: SamplingParams
    index: int
    takes_likeliest: bool  # see ``SamplingParams``
    num_candidates: int  # see ``NewSequence``
    adapter: str


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's inputs as host arrays; see ``AttentionMetadata`` for the last four.

    Valid until the next step's arrays are made: the next decodes of the same sequences reuse this object, with new
    numbers in all but ``query_start_loc``, ``block_tables`` and ``adapters``: the sequences' adapters, "" for none; no
    list if none has one.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    query_start_loc: list[int]
    seq_lens: list[int]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    adapters: list[str] | None = None


class SequenceTable:
    """One row per sequence: its token ids and its block ids. Rows are reused.

    Args:
        max_num_seqs: the most sequences that are held at once; beams, and each answer to a prompt, count as one.
    """

    def __init__(self, max_model_len: int, block_size: int, max_num_seqs: int = DEFAULT_NUM_SEQS) -> None:
        self._block_size = block_size
        # All rows at once, since a table that grows would hold a step up. One token more than the model's length: the
        # last may be sampled, though it is never computed.
        self._token_ids = _untouched(max_num_seqs, max_model_len + 1, np.int64)
        self._block_ids = _untouched(max_num_seqs, -(-(max_model_len + 1) // block_size), np.int32)
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._held: dict[int, RunnerSequence] = {}
        self._num_adapted = 0
        self._tokens = self._token_ids.data  # the same as a memoryview: faster for single tokens
        self._last: _Decodes | None = None

    def __getitem__(self, seq_id: int) -> RunnerSequence:
        return self._held[seq_id]

    def add(self, new: NewSequence) -> None:
        if new.seq_id in self._held:
            raise RuntimeError(f"sequence {new.seq_id} is already held")
        if not self._free_rows:
            raise RuntimeError(f"sequence {new.seq_id}: {len(self._held)} are held already, which is max_num_seqs")
        row = self._free_rows.pop()
        num_tokens = len(new.token_ids)
        self._token_ids[row, :num_tokens] = new.token_ids
        params = new.sampling_params
        self._held[new.seq_id] = RunnerSequence(
            row,
            num_tokens,
            new.num_prompt_tokens,
            params,
            new.index,
            params.takes_likeliest,
            new.num_candidates,
            new.adapter,
        )
        self._num_adapted += bool(new.adapter)
        self.set_blocks(new.seq_id, 0, new.block_ids)

    def drop(self, seq_id: int) -> None:
        self._last = None
        held = self._held.pop(seq_id)
        self._free_rows.append(held.row)
        self._num_adapted -= bool(held.adapter)

    def set_blocks(self, seq_id: int, first: int, block_ids: Sequence[int]) -> None:
        """Put ``block_ids`` into the sequence's block table, from index ``first`` on."""
        self._last = None
        self._block_ids[self._held[seq_id].row, first : first + len(block_ids)] = block_ids

    def append(self, seq_id: int, token_id: int) -> None:
        held = self._held[seq_id]
        self._tokens[held.row, held.num_tokens] = token_id
        held.num_tokens += 1

    def propose(self, seq_id: int, drafts: Sequence[int]) -> None:
        """Put draft tokens after the sequence's tokens; they count as its own only once they are appended."""
        held = self._held[seq_id]
        self._token_ids[held.row, held.num_tokens : held.num_tokens + len(drafts)] = drafts

    def token_ids(self, seq_id: int, num_drafts: int = 0) -> NDArray[np.int64]:
        """Prompt, then generated tokens, then the first of the draft tokens; a view."""
        held = self._held[seq_id]
        return self._token_ids[held.row, : held.num_tokens + num_drafts]

    def by_adapter(self, scheduled: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
        """``scheduled``, those with the same adapter next to one another: their rows then share its products."""
        if not self._num_adapted:
            return scheduled
        return sorted(scheduled, key=lambda share: self._held[share.seq_id].adapter)

    def arrays(self, scheduled: Sequence[ScheduledSequence]) -> StepArrays:
        """Inputs of a step that computes ``scheduled``, in that order.

        Where it has drafts, each of its tokens is a decode of its own, with the blocks of its sequence: so attention
        computes what it would without drafts, to the last bit on CPUs, and an NPU may replay a graph.
        """
        if self._last is not None and self._last.go_on(scheduled, self._token_ids):
            return self._last.step
        step, rows = self._new_arrays(scheduled)
        self._last = None
        if len(step.positions) == len(scheduled):  # only decodes, and no drafts
            self._last = _Decodes(scheduled, rows.tolist(), self._block_size, step)
        return step

    def _new_arrays(self, scheduled: Sequence[ScheduledSequence]) -> tuple[StepArrays, NDArray[np.intp]]:
        """The inputs built from scratch, and the sequences' rows."""
        rows = np.array([self._held[s.seq_id].row for s in scheduled])
        starts = np.array([s.num_computed_tokens for s in scheduled])
        counts = np.array([s.num_new_tokens for s in scheduled])
        adapters = [self._held[s.seq_id].adapter for s in scheduled] if self._num_adapted else None
        if any(s.drafts for s in scheduled):
            if adapters is not None:
                adapters = np.repeat(adapters, counts).tolist()
            starts = np.concatenate(
                [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            )
            rows, counts = np.repeat(rows, counts), np.ones(len(starts), counts.dtype)
        seq_lens = starts + counts
        ends: Sequence[int]
        if (counts == 1).all():  # only decodes: every further array operation would show in a small model's step
            ends, token_rows, positions = range(1, len(rows) + 1), rows, starts
        else:
            last = np.cumsum(counts)
            ends, token_rows = last.tolist(), np.repeat(rows, counts)
            positions = np.arange(last[-1]) + np.repeat(seq_lens - last, counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        num_blocks = -(-int(seq_lens.max()) // self._block_size)
        # Beyond a sequence's own blocks, a reused row still holds those of an older one; padding must be 0.
        table = self._block_ids[rows, :num_blocks]
        table[np.arange(num_blocks) * self._block_size >= seq_lens[:, None]] = 0
        step = StepArrays(
            input_ids=self._token_ids[token_rows, positions],
            positions=positions,
            query_start_loc=[0, *ends],
            seq_lens=seq_lens.tolist(),
            block_tables=table,
            slot_mapping=self._block_ids[token_rows, blocks].astype(np.int64) * self._block_size + offsets,
            adapters=adapters,
        )
        return step, rows


def _untouched(rows: int, columns: int, kind: type[Integer]) -> NDArray[Integer]:
    """Zeros [rows, columns] that take memory where they are touched, in small pages: numpy asks for huge ones, and to
    find and clear one of these holds a step up for up to 40 ms.
    """
    held = mmap.mmap(-1, rows * columns * np.dtype(kind).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # nor where the system gives them unasked
        with suppress(OSError):  # by a kernel that knows none
            held.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(held, kind).reshape(rows, columns)


class _Decodes:
    """A step with one token for each sequence. Until a sequence reaches another block, most numbers of the next such
    step differ by one; it is updated in place, since every array operation shows in a small model's step.

    Args:
        rows: the sequences' rows in the table.
    """

    def __init__(
        self, scheduled: Sequence[ScheduledSequence], rows: list[int], block_size: int, step: StepArrays
    ) -> None:
        self.step = step
        self._seq_ids = [share.seq_id for share in scheduled]
        self._rows = rows
        self._block_size = block_size
        self._input_ids, self._positions = step.input_ids.data, step.positions.data
        self._slots = step.slot_mapping.data

    def go_on(self, scheduled: Sequence[ScheduledSequence], token_ids: NDArray[np.int64]) -> bool:
        """Turn ``step`` into that of ``scheduled``, if that is the next token of each sequence, in the same blocks.
        Returns whether it was.
        """
        seq_lens = self.step.seq_lens
        if len(scheduled) != len(seq_lens):
            return False
        for share, seq_id, start in zip(scheduled, self._seq_ids, seq_lens, strict=True):
            if share.seq_id != seq_id or share.num_new_tokens != 1 or share.num_computed_tokens != start:
                return False
            if start % self._block_size == 0:
                return False
        for i, row in enumerate(self._rows):
            position = seq_lens[i]
            self._input_ids[i] = token_ids.item(row, position)
            self._positions[i] = position
            self._slots[i] += 1
            seq_lens[i] = position + 1
        return True
