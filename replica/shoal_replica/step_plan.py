"""A step under construction: what it computes so far, and how much of its budget is left."""

from __future__ import annotations

import msgspec

from shoal_replica.executor import MAX_SCORED_TOKENS, NewSequence, ScheduledSequence, SchedulerOutput
from shoal_replica.host_blocks import Move
from shoal_replica.kv_cache import BlockTable, TableChange
from shoal_replica.request import Sequence


class StepPlan:
    """Collects sequences until ``budget`` tokens are planned; ``output`` is then sent to the executor.

    Args:
        piece: once this many prompt tokens are planned, prompts that yield get no more.
        is_due: whether only tokens of prompts that yield count towards ``piece``: others have passed them long enough.

    Attributes:
        num_prompt_tokens, num_yielding_tokens: prompt tokens planned so far, and those of prompts that yield.
        has_put_off: whether a prompt that yields was refused tokens because the piece was full.
    """

    def __init__(self, budget: int, piece: int, is_due: bool = False) -> None:
        self.budget = budget
        self.num_sequences = self.num_prompt_tokens = self.num_yielding_tokens = 0
        self.has_put_off = False
        self._num_scored = 0
        self._piece = piece
        self._is_due = is_due
        self._scheduled: dict[int, ScheduledSequence] = {}  # by seq_id
        self._new_sequences: list[NewSequence] = []
        self._block_updates: list[tuple[int, int, tuple[int, ...]]] = []
        self._block_copies: list[tuple[int, int]] = []

    def includes(self, sequence: Sequence) -> bool:
        """Whether tokens of ``sequence`` are planned."""
        return sequence.seq_id in self._scheduled

    def planned_end(self, sequence: Sequence) -> int:
        """The number of tokens of ``sequence`` that will be computed after this step, as planned so far."""
        planned = self._scheduled.get(sequence.seq_id)
        return sequence.num_computed_tokens + (0 if planned is None else planned.num_new_tokens)

    def share(self, sequence: Sequence, end: int | None = None) -> int:
        """More tokens of ``sequence``, beyond those planned and up to its token ``end``, that the budget allows."""
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        if num_left == 1:  # it decodes
            return min(1 - self.includes(sequence), self.budget)
        num_left = (len(sequence.token_ids) if end is None else end) - self.planned_end(sequence)
        if num_left > 0 and sequence.request.yields:
            left = self._piece - (self.num_yielding_tokens if self._is_due else self.num_prompt_tokens)
            self.has_put_off |= left <= 0
            num_left = min(num_left, left)
        num_left = max(0, min(num_left, self.budget))
        if sequence.is_scored:
            num_left -= self._num_too_many(sequence, num_left)
        return num_left

    def _num_too_many(self, sequence: Sequence, num_new: int) -> int:
        """How many of ``num_new`` more tokens of a sequence go beyond those that a step may score. Prompts that yield
        leave half of these to others.
        """
        start, most = self.planned_end(sequence), MAX_SCORED_TOKENS
        if sequence.request.yields:
            most = max(1, most // 2)
        left = max(0, most - self._num_scored)
        return num_new - left if sequence.num_scored(start, start + num_new) > left else 0

    def compute(self, sequence: Sequence, num_new: int) -> None:
        """Plan ``num_new`` (more) tokens of ``sequence``; it samples if that brings it up to its last token."""
        seq_id, start, num_tokens = sequence.seq_id, sequence.num_computed_tokens, len(sequence.token_ids)
        planned = self._scheduled.get(seq_id)
        self.num_sequences += planned is None
        self.budget -= num_new
        if num_tokens - start > 1:
            self.num_prompt_tokens += num_new
            self.num_yielding_tokens += num_new * sequence.request.yields
        if planned is not None:
            num_new += planned.num_new_tokens
        num_scored = 0
        if sequence.is_scored:
            num_scored = sequence.num_scored(start, start + num_new)
            self._num_scored += num_scored - (0 if planned is None else planned.num_scored)
        self._scheduled[seq_id] = ScheduledSequence(seq_id, start, num_new, start + num_new == num_tokens, num_scored)

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Let a sequence whose last token is planned compute draft tokens as well."""
        self.budget -= len(drafts)
        share = self._scheduled[sequence.seq_id]
        self._scheduled[sequence.seq_id] = msgspec.structs.replace(
            share, num_new_tokens=share.num_new_tokens + len(drafts), drafts=drafts
        )

    def introduce(self, sequence: Sequence, block_table: BlockTable, num_candidates: int = 0) -> None:
        """Send the whole sequence, which the executor does not hold."""
        self._new_sequences.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=tuple(block_table),
                sampling_params=sequence.request.sampling_params,
                index=sequence.index,
                num_candidates=num_candidates,
                adapter=sequence.request.adapter,
            )
        )

    def update_blocks(self, sequence: Sequence, change: TableChange) -> None:
        """Send a change to the block table of a sequence that the executor holds."""
        self._block_updates.append((sequence.seq_id, change.first_index, change.block_ids))

    def copy_blocks(self, change: TableChange) -> None:
        self._block_copies.extend(change.copies)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy a block before the step computes. ``source`` may have been given out in this step, even as
        ``destination``.
        """
        if source != destination:
            self._block_copies.append((source, destination))

    def output(
        self,
        step: int,
        dropped_seq_ids: tuple[int, ...],
        moves: tuple[tuple[Move, ...], tuple[Move, ...]],
        chosen_tokens: tuple[tuple[int, int], ...] = (),
        num_drafts_wanted: int = 0,
    ) -> SchedulerOutput:
        """The finished step. ``moves`` are the moves out to host memory, and those back in."""
        return SchedulerOutput(
            step=step,
            scheduled=tuple(self._scheduled.values()),
            new_sequences=tuple(self._new_sequences),
            block_updates=tuple(self._block_updates),
            block_copies=tuple(self._block_copies),
            dropped_seq_ids=dropped_seq_ids,
            moves_out=moves[0],
            moves_in=moves[1],
            chosen_tokens=chosen_tokens,
            num_drafts_wanted=num_drafts_wanted,
        )
