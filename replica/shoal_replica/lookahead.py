"""Plans the next step while the current one runs.

Between two decode-only steps little is left to decide: each sequence goes on by one token unless the running step ends
it. So the next step is planned ahead, the executor starts it as soon as the current one ends, and the current one's
tokens are processed while the next step runs. Whatever needs a decision (a waiting request that has a slot, blocks that
run out, siblings to start, beams to choose, drafts to try) is left to the scheduler, which then plans the next step as
if nothing had been planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from collections.abc import Sequence as Items

from shoal_replica.executor import ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.kv_cache import KVCacheManager, TableChange
from shoal_replica.request import FinishRule, Sequence
from shoal_replica.speculation import Speculation


class Lookahead:
    """Reads the scheduler's state, and allocates blocks for the tokens to come. A sequence keeps such blocks even if
    the planned step is dropped.

    Args:
        by_id, running, waiting, beams: the scheduler's own collections, as they change.
        finish: decides when a sequence ends.
        speculation: decides which drafts are worth computing.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        by_id: Mapping[int, Sequence],
        running: Items[Sequence],
        waiting: Sized,
        beams: Sized,
        max_num_seqs: int,
        finish: FinishRule,
        speculation: Speculation,
    ) -> None:
        self._kv = kv
        self._by_id = by_id
        self._running = running
        self._waiting = waiting
        self._beams = beams
        self._max_num_seqs = max_num_seqs
        self._finish = finish
        self._speculation = speculation
        self._untold: dict[int, list[TableChange]] = {}  # by sequence: changes in planned steps that have not run

    def plan(self, before: SchedulerOutput) -> SchedulerOutput | None:
        """The step after ``before``, whose result is not known yet. None if the scheduler has to decide."""
        if self._beams or self._has_candidates():
            return None
        shares = {share.seq_id: share for share in before.scheduled}
        scheduled: list[ScheduledSequence] = []
        growing: list[tuple[int, int]] = []
        for sequence in self._running:
            share = shares.get(sequence.seq_id)
            if share is None or not share.samples or share.drafts or sequence.unstarted_indexes:
                return None
            start = share.num_computed_tokens + share.num_new_tokens
            scheduled.append(ScheduledSequence(sequence.seq_id, start, 1, True))
            if not self._kv.fits_last_block(sequence.seq_id, start, start + 1):
                growing.append((sequence.seq_id, start))
        if not scheduled or not self._can_grow(growing):
            return None
        updates = []
        for seq_id, start in growing:
            change = self._kv.append(seq_id, start, start + 1)
            if change is not None:
                self._untold.setdefault(seq_id, []).append(change)
                updates.append((seq_id, change.first_index, change.block_ids))
        moves = self._kv.host.moves_ahead()
        return SchedulerOutput(
            before.step + 1,
            tuple(scheduled),
            block_updates=tuple(updates),
            moves_out=moves,
            num_drafts_wanted=self._speculation.num_wanted(len(scheduled)),
        )

    def confirm(self, ahead: SchedulerOutput, result: StepResult) -> SchedulerOutput | None:
        """``ahead`` without the sequences that ``result``, of the step before it, ends. None if the scheduler has to
        decide.

        Changes nothing, and may be called in the executor's thread, before or after ``result`` is processed.
        """
        starts = {share.seq_id: share.num_computed_tokens for share in ahead.scheduled}
        # A sequence that was planned but is missing from the step before has been aborted in between.
        gone = starts.keys() - {token.seq_id for token in result.sampled}
        for token in result.sampled:
            sequence, start = self._by_id.get(token.seq_id), starts.get(token.seq_id)
            if sequence is None or (
                start is not None
                and self._finish.reason(sequence.request, token.token_id, start + 1, token.is_cut) is not None
            ):
                gone.add(token.seq_id)
        if (self._waiting and gone) or self._has_candidates():
            return None
        kept = tuple(share for share in ahead.scheduled if share.seq_id not in gone)
        if not kept or self._speculation.is_worth_it([d for d in result.drafts if d.seq_id not in gone], len(kept)):
            return None
        updates = tuple(update for update in ahead.block_updates if update[0] not in gone)
        return SchedulerOutput(
            ahead.step,
            kept,
            block_updates=updates,
            moves_out=ahead.moves_out,
            num_drafts_wanted=ahead.num_drafts_wanted,
        )

    def note_told(self, ahead: SchedulerOutput) -> None:
        """A planned step has run: the executor knows its block updates."""
        self._kv.host.note_moved(len(ahead.moves_out))
        for seq_id, _, _ in ahead.block_updates:
            if seq_id in self._untold:
                self._untold[seq_id].pop(0)

    def take_untold(self, seq_id: int) -> list[TableChange]:
        """Changes to a sequence's block table that were planned for steps that did not run."""
        return self._untold.pop(seq_id, [])

    def _has_candidates(self) -> bool:
        """Whether the scheduler could start a waiting sequence, apart from blocks."""
        return len(self._waiting) > 0 and len(self._running) < self._max_num_seqs

    def _can_grow(self, growing: list[tuple[int, int]]) -> bool:
        """Whether a free block for each is enough, and no block that others read would have to be copied."""
        if len(growing) > self._kv.pool.num_free:
            return False
        return not any(self._kv.reads_shared(seq_id, start, start + 1) for seq_id, start in growing)
