"""Plans the next step while the current one runs.

Between two decode-only steps little is left to decide: each sequence goes on by one token unless the running step ends
it, and by the drafts that the running step offers. So the next step is planned ahead, the executor completes the plan
and starts it as soon as the current step ends, and the current one's tokens are processed while the next step runs.
Whatever needs a decision (a waiting request that has a slot, blocks that run out, siblings to start, beams to choose)
is left to the scheduler, which then plans the next step as if nothing had been planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from collections.abc import Sequence as Items
from dataclasses import dataclass

import msgspec

from shoal_replica.config import SchedulerConfig
from shoal_replica.executor import Draft, ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.finish_rule import FinishRule
from shoal_replica.host_blocks import Move
from shoal_replica.kv_cache import KVCacheManager, TableChange
from shoal_replica.request import Sequence
from shoal_replica.speculation import Speculation


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of decodes, as far as it is known before the step before it has ended. ``room``: its sequences, and how
    many tokens of each their blocks can hold; ``num_drafts``: the most that it may have of each. The rest is as in
    ``SchedulerOutput``.
    """

    step: int
    room: Mapping[int, int]
    num_drafts: int
    block_updates: tuple[tuple[int, int, tuple[int, ...]], ...]
    moves_out: tuple[Move, ...]
    num_drafts_wanted: int


class Lookahead:
    """Reads the scheduler's state, and allocates blocks for the tokens to come. A sequence keeps such blocks even if
    the planned step is dropped, or has fewer drafts than there is room for.

    Args:
        by_id, running, waiting, beams: the scheduler's own collections, as they change.
        finish: decides when a sequence ends.
        speculation: decides which drafts are worth computing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        by_id: Mapping[int, Sequence],
        running: Items[Sequence],
        waiting: Sized,
        beams: Sized,
        finish: FinishRule,
        speculation: Speculation,
    ) -> None:
        self._config = config
        self._kv = kv
        self._by_id = by_id
        self._running = running
        self._waiting = waiting
        self._beams = beams
        self._finish = finish
        self._speculation = speculation
        self._untold: dict[int, list[TableChange]] = {}  # by sequence: changes in planned steps that have not run

    def plan(self, before: SchedulerOutput | PlannedStep) -> PlannedStep | None:
        """The step after ``before``, whose result is not known yet, while those of all steps before it have been
        processed. None if the scheduler has to decide.
        """
        if self._beams or self._has_candidates():
            return None
        starts = self._latest_starts(before)
        if not starts or any(s.seq_id not in starts or s.unstarted_indexes for s in self._running):
            return None
        updates = self._grow(starts, before.num_drafts_wanted) if before.num_drafts_wanted else None
        if updates is None and (updates := self._grow(starts, 0)) is None:
            return None
        size = self._kv.block_size
        return PlannedStep(
            before.step + 1,
            {seq_id: size * len(self._kv.block_table(seq_id)) for seq_id in starts},
            before.num_drafts_wanted,
            updates,
            self._kv.host.moves_ahead(),
            self._speculation.num_wanted(len(starts)),
        )

    def confirm(self, planned: PlannedStep, before: SchedulerOutput, result: StepResult) -> SchedulerOutput | None:
        """What is to be computed after ``before``, which had ``result``: ``planned`` without the sequences that have
        ended, and with the drafts that are worth it. None if the scheduler has to decide.

        Changes nothing, and may be called in the executor's thread, whether ``result`` is processed yet or not.
        """
        sampled = result.by_sequence()
        shares = {share.seq_id: share for share in before.scheduled}
        kept: dict[int, ScheduledSequence] = {}
        for seq_id in planned.room:
            sequence, share = self._by_id.get(seq_id), shares.get(seq_id)
            if sequence is None or share is None:
                continue  # aborted
            num_known, tokens = share.num_computed_tokens + share.num_new_tokens - len(share.drafts), sampled[seq_id]
            num_computed = num_known + len(tokens) - 1
            if self._finish.cut(sequence.request, num_known, tokens) is None:
                kept[seq_id] = ScheduledSequence(seq_id, num_computed, 1, True)
        if not kept or (self._waiting and len(kept) < len(planned.room)) or self._has_candidates():
            return None
        offers = [_within(offer, planned.room[offer.seq_id]) for offer in result.drafts if offer.seq_id in kept]
        budget = self._config.max_num_batched_tokens - len(kept)
        for seq_id, drafts in self._speculation.choose(offers, len(kept), budget).items():
            start = kept[seq_id].num_computed_tokens
            kept[seq_id] = ScheduledSequence(seq_id, start, 1 + len(drafts), True, drafts=drafts)
        return SchedulerOutput(
            planned.step,
            tuple(kept.values()),
            block_updates=tuple(update for update in planned.block_updates if update[0] in kept),
            moves_out=planned.moves_out,
            num_drafts_wanted=planned.num_drafts_wanted,
        )

    def note_told(self, output: SchedulerOutput) -> None:
        """A planned step has run: the executor knows its block updates."""
        self._kv.host.note_moved(len(output.moves_out))
        for seq_id, _, _ in output.block_updates:
            if seq_id in self._untold:
                self._untold[seq_id].pop(0)

    def take_untold(self, seq_id: int) -> list[TableChange]:
        """Changes to a sequence's block table that were planned for steps that did not run."""
        return self._untold.pop(seq_id, [])

    def _has_candidates(self) -> bool:
        """Whether the scheduler could start a waiting sequence, apart from blocks."""
        return len(self._waiting) > 0 and len(self._running) < self._config.max_num_seqs

    def _latest_starts(self, before: SchedulerOutput | PlannedStep) -> dict[int, int]:
        """For each running sequence that is sampled in ``before``: the last position that its next token can have, if
        all drafts are right, but not beyond the last token that it may compute.
        """
        starts: dict[int, int] = {}
        if isinstance(before, SchedulerOutput):
            ends = {s.seq_id: s.num_computed_tokens + s.num_new_tokens for s in before.scheduled if s.samples}
        else:
            ends = {
                s.seq_id: min(before.room[s.seq_id], s.num_computed_tokens + 1 + before.num_drafts)
                for s in self._running
                if s.seq_id in before.room
            }
        for sequence in self._running:
            if sequence.seq_id in ends:
                left = self._finish.num_left(sequence.request, sequence.num_tokens)
                starts[sequence.seq_id] = min(ends[sequence.seq_id], sequence.num_tokens + max(left, 1) - 2)
        return starts

    def _grow(self, starts: Mapping[int, int], num_drafts: int) -> tuple[tuple[int, int, tuple[int, ...]], ...] | None:
        """Allocate blocks for the token at each of ``starts`` and so many drafts after it, and return the changes to
        the block tables. None, and nothing is changed, if a block that others read would have to be copied, or if there
        are too few free ones: where drafts are planned, one block per sequence must remain free.
        """
        growing: list[tuple[int, int, int]] = []
        num_blocks = 0
        for seq_id, start in starts.items():
            end = start + 1
            if num_drafts:
                end += max(0, min(num_drafts, self._finish.num_left(self._by_id[seq_id].request, end) - 1))
            if not self._kv.fits_last_block(seq_id, start, end):
                if self._kv.reads_shared(seq_id, start, end):
                    return None
                num_blocks += self._kv.num_blocks_to_append(seq_id, start, end)
                growing.append((seq_id, start, end))
        if num_blocks and num_blocks + (len(starts) if num_drafts else 0) > self._kv.pool.num_free:
            return None
        updates = []
        for seq_id, start, end in growing:
            change = self._kv.append(seq_id, start, end)
            if change is not None:
                self._untold.setdefault(seq_id, []).append(change)
                updates.append((seq_id, change.first_index, change.block_ids))
        return tuple(updates)


def _within(offer: Draft, room: int) -> Draft:
    """As much of an offer as there is room for."""
    most = max(0, room - offer.num_tokens)
    return offer if len(offer.token_ids) <= most else msgspec.structs.replace(offer, token_ids=offer.token_ids[:most])
