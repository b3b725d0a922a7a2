"""Continuous batching: which tokens of which sequences each step computes.

There is no prefill or decode phase. A sequence is behind by ``num_tokens - num_computed_tokens`` and catches up within
the token budget of each step (iteration-level scheduling: Orca, OSDI '22; chunked prefill: Sarathi-Serve, OSDI '24).
"""

from __future__ import annotations

from collections.abc import Collection

from shoal_replica.beams import Beams
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import InvalidArgument, ResourceExhausted
from shoal_replica.executor import SchedulerOutput, StepResult
from shoal_replica.executor_roster import ExecutorRoster
from shoal_replica.finish_rule import FinishRule
from shoal_replica.kv_cache import Cached, KVCacheManager
from shoal_replica.ledger import Ledger
from shoal_replica.live_sequences import LiveSequences
from shoal_replica.lookahead import Lookahead
from shoal_replica.pieces import Pieces
from shoal_replica.preemption import Preemption
from shoal_replica.prefill_pace import UNKNOWN_PACE, Pace
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import FinishReason, Request, Sequence, SequenceStatus, TokenDelta
from shoal_replica.scheduling_policy import by_progress, insert, rank, waits_behind
from shoal_replica.shared_prefix import expected_cached_tokens, find_ahead, take_over
from shoal_replica.speculation import Speculation
from shoal_replica.stats import ReplicaStats, Totals
from shoal_replica.step_plan import StepPlan
from shoal_replica.waiting_line import WaitingLine
from shoal_replica.waiting_queue import WaitingQueue


class Scheduler:
    """Owns every sequence from ``add`` to its FinishReason. Has no clock, no model and no I/O.

    Attributes:
        kv, totals: others may read them, and exchange blocks with other replicas.

    Args:
        max_model_len: most tokens per sequence, prompt and output together; must fit the pool.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        adapters: names of the LoRA adapters that requests may ask for; whoever gives it may change it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        adapters: Collection[str] = (),
    ) -> None:
        if max_model_len > cache_config.num_blocks * cache_config.block_size:
            raise ValueError("max_model_len does not fit the block pool")
        self.config = config
        self.kv = kv = KVCacheManager(cache_config)
        self._finish_rule = rule = FinishRule(frozenset(eos_token_ids), max_model_len, adapters)
        self._live = live = LiveSequences()
        self._waiting = waiting = WaitingQueue(config.policy)
        self._running = running = list[Sequence]()  # in rank order: preemption victims come last
        self._roster = ExecutorRoster(kv, rule)
        self.totals = totals = Totals()
        self.now = 0.0  # time of the last step, on the caller's clock
        self._beams = beams = Beams(kv, live, running, config.policy, rule, self._finish)
        self._preemption = Preemption(kv, running, beams, config.policy, totals, self._requeue)
        self._speculation = speculation = Speculation(config.num_speculative_tokens or 0, kv, live.by_id, rule, totals)
        self.lookahead = Lookahead(config, kv, live.by_id, running, waiting, beams, rule, speculation)
        self._pieces = Pieces(config.max_num_batched_tokens)
        self._ledger = Ledger(config, kv, running, waiting, totals)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting.num_all or self._running)

    @property
    def has_room(self) -> bool:
        """Whether ``add`` would accept another request."""
        return self._waiting.num_all < self.config.max_num_waiting

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def add(self, request: Request, num_coming_blocks: int = 0) -> None:
        """Queue a request. If ``num_coming_blocks`` of its first blocks are on their way, it waits for ``release``.

        Raises:
            InvalidArgument: the id is in use, or tokens or beams do not fit the model, a step or the block pool.
            Unavailable: its adapter is not loaded.
            ResourceExhausted: ``max_num_waiting`` sequences are waiting already.
        """
        if request.request_id in self:
            raise InvalidArgument("request_id", request.request_id, "must not be that of a running request")
        self._finish_rule.check(request)
        self._beams.check(request, self.config.max_num_seqs)
        if not self.has_room:
            self.totals.num_refused += 1
            told = f"{self._waiting.num_all} sequences are waiting; max_num_waiting is {self.config.max_num_waiting}"
            raise ResourceExhausted(told, retry_after_s=1.0)
        self._enqueue(self._live.start(request, request.index), num_coming_blocks)

    def release(self, request_id: str) -> None:
        """A held request may start. Unknown ids are ignored."""
        for sequence in [s for s in self._waiting.held if s.request.request_id == request_id]:
            self._waiting.remove(sequence)
            self._enqueue(sequence)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Choose the next step's tokens and allocate blocks for them. None if there is nothing to compute."""
        self.now = now
        behind, level = by_progress(self._running)
        plan, decodes_wait = self._pieces.plan(level, behind, self._waiting, self.config.max_num_seqs - self._num_slots)
        if not decodes_wait:
            self._advance_level(plan, level)
        line = WaitingLine(self._waiting, behind, self.kv)
        for sequence in behind:
            self._admit_waiting(plan, line, before=sequence)
            self._advance(plan, [sequence])
        self._admit_waiting(plan, line)
        if decodes_wait and not plan.num_sequences:  # and no waiting sequence could be admitted either
            decodes_wait = False
            self._advance_level(plan, level)
        self._pieces.note(plan, decodes_wait)
        if not plan.num_sequences:
            return None
        if not self._beams:
            self._speculation.extend(plan, level)
        dropped = self._roster.take_dropped()
        chosen, num_drafts = self._beams.take_chosen(dropped), self._speculation.num_wanted(len(self._running))
        return plan.output(self.totals.num_steps + 1, dropped, self.kv.host.take_moves(), chosen, num_drafts)

    def update(self, output: SchedulerOutput, result: StepResult, now: float = 0.0) -> list[TokenDelta]:
        """Process a step's tokens at ``now``: advance sequences, commit full blocks, end finished sequences."""
        deltas, self.now = list[TokenDelta](), max(self.now, now)
        self.totals.num_steps = output.step
        self._speculation.take(output, result)
        for scored in result.scored:
            if (sequence := self._live.by_id.get(scored.seq_id)) is not None:
                sequence.prompt_logprobs[scored.after :] = scored.logprobs
        sampled, has_beams = result.by_sequence(), bool(self._beams)
        for share in output.scheduled:
            sequence = self._live.by_id.get(share.seq_id)
            if sequence is None or sequence.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            tokens = sampled[share.seq_id] if share.samples else []
            reason = self._finish_rule.cut(sequence.request, sequence.num_tokens, tokens)
            num_computed = sequence.advance(share, max(0, len(tokens) - 1))
            if num_computed % self.kv.block_size < share.num_new_tokens:  # it has filled a block
                sequence.extend_hashes(self.kv.block_size)
                self.kv.commit(sequence.seq_id, sequence.block_hashes, num_computed, sequence.tokens)
            if not share.samples:
                continue
            self.totals.num_generated_tokens += len(tokens)
            if has_beams and self._beams.take(sequence, tokens[0]):
                continue
            if len(sequence.token_ids) == len(sequence.request.prompt_token_ids):
                self._fork_siblings(sequence)
            sequence.token_ids.append(tokens[-1].token_id)
            deltas.append(sequence.delta(sequence.index, tokens, reason, self.now))
            if reason is not None:
                self._finish(sequence, reason)
        return [*deltas, *self._beams.advance(self.now)] if has_beams else deltas

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[TokenDelta]:
        """End a request, or one of its sequences, and free its blocks at once. Unknown ids are ignored.

        Siblings that have not started end with the sequence that would have started them, and beams all together.
        """
        deltas, own = list[TokenDelta](), self._live.of(request_id)
        if own and own[0].request.sampling_params.is_beam_search:
            return self._beams.abort(request_id, reason)
        for sequence in [s for s in own if index is None or s.index == index]:
            deltas += [sequence.delta(i, (), reason) for i in (sequence.index, *sequence.unstarted_indexes)]
            self._finish(sequence, reason)
        return deltas

    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return self._live.request_ids()

    def may_leave(self, request_id: str, also_started: bool = False) -> bool:
        """See ``LiveSequences.may_leave``."""
        return self._live.may_leave(request_id, also_started)

    def take_block_events(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """The block hashes stored and removed since the last call, as net changes."""
        return self.kv.prefix_cache.take_events()

    def stats(
        self, time_s: float, step_s: float = 0.0, draining: bool = False, busy_s: float = 0.0, pace: Pace = UNKNOWN_PACE
    ) -> ReplicaStats:
        """The ledger as of now; ``time_s`` is the caller's wall clock."""
        return self._ledger.stats(self.now, time_s, step_s, draining, busy_s, pace)

    def check_invariants(self) -> None:
        """All data structures agree, and every sequence that has not ended is in exactly one queue."""
        self.kv.check_invariants()
        self._ledger.check_invariants()
        live = {s.seq_id for s in (*self._running, *self._waiting, *self._waiting.held)}
        assert live == self._live.by_id.keys()
        self._live.check_invariants()
        self._beams.check_invariants()
        assert len(self._roster) <= self._num_slots <= self.config.max_num_seqs  # so many rows has a SequenceTable
        assert all(s.num_tokens <= self._finish_rule.max_model_len for s in self._running)

    # Internal steps of the above

    @property
    def _num_slots(self) -> int:
        """Slots of a step that are taken, or kept for beams to come."""
        return len(self._running) + (self._beams.num_reserved_slots if self._beams else 0)

    def _enqueue(self, sequence: Sequence, num_coming_blocks: int = 0) -> None:
        sequence.extend_hashes(self.kv.block_size)
        num_cached = expected_cached_tokens(sequence, self.kv, (*self._running, *self._waiting.unordered))
        num_cached = max(num_cached, num_coming_blocks * self.kv.block_size)
        self._waiting.push(sequence, num_cached, is_held=num_coming_blocks > 0)

    def _advance_level(self, plan: StepPlan, level: list[Sequence]) -> None:
        """Plan the decoding sequences, one token each."""
        if not self._beams:
            self._advance(plan, level)
            return
        for unit in self._beams.units(level):
            if len(unit) == 1 or self._preemption.make_room_for_beams(unit):
                self._advance(plan, unit)

    def _advance(self, plan: StepPlan, sequences: list[Sequence], end: int | None = None) -> None:
        """Plan running sequences in rank order, each up to token ``end``; if blocks run out, preempt from the back."""
        for sequence in sequences:
            if plan.budget == 0:
                return
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by a sequence before it
            start, num_new = plan.planned_end(sequence), plan.share(sequence, end)
            if num_new == 0:
                continue  # it yields, or is already planned as far as it may be
            changes = self.lookahead.take_untold(sequence.seq_id)
            if not self.kv.fits_last_block(sequence.seq_id, start, start + num_new):
                if not self._preemption.make_room(sequence, start + num_new):
                    continue
                change = self.kv.append(sequence.seq_id, start, start + num_new)
                if change is not None:
                    plan.copy_blocks(change)
                    changes.append(change)
            if sequence not in self._roster:
                self._roster.introduce(plan, sequence)
            else:
                for change in changes:
                    plan.update_blocks(sequence, change)
            plan.compute(sequence, num_new)

    def _admit_waiting(self, plan: StepPlan, line: WaitingLine, before: Sequence | None = None) -> None:
        """Start sequences from the line while budget, slots and blocks last; only those that rank before ``before``."""
        room = self.config.max_num_seqs - self._num_slots - line.num_kept_slots
        admitted, preempted = list[Sequence](), self._waiting.preempted
        while line and room > 0 and plan.budget:
            sequence = line.first
            if before is not None and rank(before, self.config.policy) < rank(sequence, self.config.policy):
                break
            if plan.num_sequences and waits_behind(sequence, preempted, self.config.policy):
                break  # blocks are short: start no new sequence until the preempted ones are back
            num_slots = sequence.request.sampling_params.beam_width
            if num_slots > room and plan.share(sequence):  # one that gets no tokens keeps no others waiting
                break
            line.pass_first()
            if plan.share(sequence) == 0:
                continue  # it yields, or the step scores no more
            room -= num_slots
            matched = self.kv.match(sequence.block_hashes, sequence.num_tokens)
            if self._waits_for_another(plan, line, sequence, len(matched)):
                continue
            num_kept = line.num_kept_blocks + self._beams.num_blocks_to_come(sequence)
            if not self.kv.can_allocate(matched, sequence.num_tokens + 1, num_kept):
                line.close()
                break
            take_over(sequence, matched, plan, self.kv)
            self._note_run(sequence, matched)
            sequence.move(SequenceStatus.RUNNING)
            self._beams.open(sequence)
            self._roster.introduce(plan, sequence)
            plan.compute(sequence, plan.share(sequence))
            admitted.append(sequence)
            line.computing.append(sequence)
        if admitted:
            self._waiting.take(admitted)
            self._running.extend(admitted)
            self._running.sort(key=lambda s: rank(s, self.config.policy))

    def _waits_for_another(self, plan: StepPlan, line: WaitingLine, sequence: Sequence, num_matched: int) -> bool:
        """Whether ``sequence`` waits for another that computes what it needs next. The other is then planned in its
        place in this step, as far as the two share, and the slot and blocks that it will need are reserved for it.
        """
        ahead = find_ahead(sequence, num_matched, line.computing, self.kv)
        if ahead is None or not ahead.is_worth_a_wait(sequence, plan, self.config.max_num_batched_tokens):
            return False
        self._advance(plan, [ahead.sequence], ahead.num_tokens)  # no block: a prompt has all of its own from the start
        if not plan.includes(ahead.sequence):
            return False
        if not sequence.request.yields:  # one that yields may wait for many pieces, and its slot would be idle
            line.keep(sequence, ahead.num_tokens // self.kv.block_size)
        return True

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait again, of which the executor has to be told anew."""
        self._drop(sequence)
        self._enqueue(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.lookahead.take_untold(sequence.seq_id)
        self._roster.drop(sequence)

    def _note_run(self, sequence: Sequence, matched: list[Cached]) -> None:
        self._ledger.note_run(sequence, matched, self.now)

    def _fork_siblings(self, parent: Sequence) -> None:
        """Start the other sequences of an ``n > 1`` request on the parent's prompt blocks. Each recomputes the last
        token of the prompt, from which its own first token is sampled.
        """
        for index in parent.unstarted_indexes:
            child = self._live.start(parent.request, index)  # starts from the prompt: only n == 1 can be resumed
            child.num_cached_tokens = parent.num_cached_tokens
            child.first_scheduled_s = parent.first_scheduled_s
            if self._num_slots < self.config.max_num_seqs:
                self.kv.fork(parent.seq_id, child.seq_id)
                child.num_computed_tokens = child.num_tokens - 1
                child.extend_hashes(self.kv.block_size)
                child.move(SequenceStatus.RUNNING)
                insert(self._running, child, self.config.policy)
            else:
                self._enqueue(child)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.kv.free(sequence.seq_id)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self._drop(sequence)
        is_last = self._live.end(sequence)
        if is_last:
            self._beams.close(sequence.request.request_id)
        self._ledger.note_end(sequence, reason, is_last)
