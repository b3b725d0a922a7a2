"""Decodes that are alike, simulated together: within a step as one entry, and over a stretch of steps as one event."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from shoal_cluster.sim.shared_pool import SharedPool
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, SchedulerOutput, StepResult
from shoal_replica.executor_roster import ExecutorRoster
from shoal_replica.kv_cache import Cached
from shoal_replica.request import Request, Sequence, SequenceStatus, TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.step_plan import StepPlan

FIRST_OUTPUT_TOKEN_ID = 2**31  # above every token id of a simulated prompt: outputs never look like prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRequest(Request):
    """A request with four bytes per token, since thousands of long prompts are in memory at once.

    ``prompt_token_ids`` is an array of type "I" (unsigned).
    """

    def known_token_ids(self) -> array[int]:
        token_ids = array("I", self.prompt_token_ids)
        token_ids.extend(self.output_token_ids)
        return token_ids


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive decode steps taken as one event: how long each takes, and when it ends."""

    steps_s: list[float]
    ends_s: list[float]


class SteadyScheduler(Scheduler):
    """The scheduler for a model that is not computed: each sequence samples the same token again and again.

    Most decodes only append that token: they take no block, fill none and do not end. They are left out of a step's
    output and listed in ``alike`` instead, and the deltas of a sequence report its first token, then all others
    together with its last. Otherwise a step has the same effect as the scheduler's, which a property test checks. Works
    for requests of one sequence (n = 1) that no sampled token ends.

    Attributes:
        alike: sequences of the last scheduled step that only decode.
        num_alike_tokens: their computed tokens before that step, summed.
        shared_pool: prefixes that need not be computed although they are not cached here.
    """

    shared_pool: SharedPool | None = None

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig, max_model_len: int) -> None:
        super().__init__(config, cache_config, max_model_len, ())
        self._roster = _NoExecutor(self.kv, self._finish_rule)
        self.alike: list[Sequence] = []
        self.num_alike_tokens = 0
        self._alike_until: dict[int, int] = {}  # by seq_id: number of tokens up to which it is alike
        self._started: dict[str, tuple[Sequence, int]] = {}  # by request id, with the number of output tokens reported

    def schedule(self, now: float) -> SchedulerOutput | None:
        self.alike, self.num_alike_tokens = [], 0
        return super().schedule(now)

    def finish_step(self, output: SchedulerOutput) -> list[TokenDelta]:
        """``update`` with a token for each sequence that samples; returns only first and last deltas."""
        shares = (share for share in output.scheduled if share.samples)
        sampled = tuple(SampledToken(share.seq_id, FIRST_OUTPUT_TOKEN_ID + share.seq_id) for share in shares)
        deltas = self.update(output, StepResult(sampled))
        self._go_on(1)
        return [self._with_untold(d) for d in deltas if d.start is not None or d.finish_reason is not None]

    def num_steady_steps(self, output: SchedulerOutput, limit: int) -> int:
        """How many steps, from ``output`` on and including it, have only alike decodes and no waiting request: at least
        1, at most ``limit``. Valid until a request arrives or is aborted.
        """
        if self._waiting or output.scheduled or len(self.alike) != len(self._running):
            return 1
        until = self._alike_until
        return max(1, min(limit, min(until[s.seq_id] - len(s.token_ids) for s in self.alike)))

    def finish_steps(self, num_steps: int, now: float) -> None:
        """``finish_step`` for ``num_steps`` steps of the same sequences, all alike. The last step began at ``now``."""
        self.now = now
        self.totals.num_steps += num_steps
        self._go_on(num_steps)

    def abort_all(self) -> list[TokenDelta]:
        """End every request; return deltas of their tokens that have not been reported yet."""
        untold = [self._delta(s, num_told) for s, num_told in self._started.values() if s.num_output_tokens > num_told]
        self._started.clear()
        for request_id in self.request_ids():
            self.abort(request_id)
        return untold

    # Parts of the above

    def _advance_level(self, plan: StepPlan, level: list[Sequence]) -> None:
        until = self._alike_until
        alike = [s for s in level if len(s.token_ids) < until.get(s.seq_id, 0)]
        others = [] if len(alike) == len(level) else [s for s in level if len(s.token_ids) >= until.get(s.seq_id, 0)]
        sizes = [(s.seq_id, s.num_computed_tokens, len(s.token_ids)) for s in others]
        if sum([self.kv.num_blocks_to_append(*size) for size in sizes]) > self.kv.pool.num_free:
            super()._advance_level(plan, level)  # some sequence has to be preempted
            return
        for sequence in others:
            if self._becomes_alike(sequence):
                alike.append(sequence)
            else:
                self._advance(plan, [sequence])
        plan.budget -= len(alike)
        plan.num_sequences += len(alike)
        self.alike, self.num_alike_tokens = alike, sum([s.num_computed_tokens for s in alike])

    def _becomes_alike(self, sequence: Sequence) -> bool:
        """Whether a decoding sequence will be alike for a while; if so, it gets the block that it needs for that."""
        request, start, end = sequence.request, sequence.num_computed_tokens, len(sequence.token_ids)
        if sequence.num_output_tokens <= len(request.output_token_ids):
            return False  # its first token is still to come
        block_size, max_tokens = self.kv.block_size, request.sampling_params.max_tokens
        last = self._finish_rule.max_model_len
        if max_tokens is not None:
            last = min(last, request.num_prompt_tokens + max_tokens)
        until = min(last - 1, (start // block_size + 1) * block_size)
        if end >= until:
            return False
        if not self.kv.fits_last_block(sequence.seq_id, start, end):
            self.kv.append(sequence.seq_id, start, end)
        self._alike_until[sequence.seq_id] = until
        return True

    def _go_on(self, num_steps: int) -> None:
        running = SequenceStatus.RUNNING
        going = [s for s in self.alike if s.status is running]  # the others were preempted
        self.totals.num_generated_tokens += num_steps * len(going)
        for sequence in going:
            sequence.num_computed_tokens += num_steps
            if num_steps == 1:
                sequence.token_ids.append(FIRST_OUTPUT_TOKEN_ID + sequence.seq_id)
            else:
                sequence.token_ids.extend((FIRST_OUTPUT_TOKEN_ID + sequence.seq_id,) * num_steps)

    def _with_untold(self, delta: TokenDelta) -> TokenDelta:
        """``delta``, extended by the tokens before it that were not reported."""
        request_id, position = delta.request_id, delta.position
        if delta.finish_reason is not None:
            sequence, num_told = self._started.pop(request_id, (None, position))
            if sequence is not None and num_told < position:
                return msgspec.structs.replace(self._delta(sequence, num_told), finish_reason=delta.finish_reason)
        else:
            self._started[request_id] = (self._live.of(request_id)[0], position + 1)
        return delta

    def _delta(self, sequence: Sequence, num_told: int) -> TokenDelta:
        return TokenDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            position=num_told,
            token_ids=(FIRST_OUTPUT_TOKEN_ID + sequence.seq_id,) * (sequence.num_output_tokens - num_told),
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _drop(self, sequence: Sequence) -> None:
        self._alike_until.pop(sequence.seq_id, None)
        super()._drop(sequence)

    def _note_run(self, sequence: Sequence, matched: list[Cached]) -> None:
        if self.shared_pool is not None:
            block_size = self.kv.block_size
            reusable = sequence.block_hashes[: (sequence.num_tokens - 1) // block_size]
            num_tokens = self.shared_pool.use(reusable) * block_size
            if num_tokens > sequence.num_computed_tokens:
                sequence.num_computed_tokens = num_tokens
                self.kv.commit(sequence.seq_id, sequence.block_hashes, num_tokens)
        super()._note_run(sequence, matched)


class _NoExecutor(ExecutorRoster):
    def introduce(self, plan: StepPlan, sequence: Sequence) -> None:
        """There is nobody to be given the tokens and blocks."""
        self._held.add(sequence.seq_id)
