"""Many steps at once: stretches in which a replica only decodes are one event of simulated time."""

from __future__ import annotations

from shoal_cluster.sim.shared_pool import SharedPool
from shoal_replica.executor import SchedulerOutput, StepResult
from shoal_replica.kv_cache import Cached
from shoal_replica.request import Sequence, SequenceStatus, TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.step_plan import StepPlan


class SteadyScheduler(Scheduler):
    """The scheduler, which can also say how long it will go on alike, and take that stretch in one call.

    Nothing differs from as many calls of ``schedule`` and ``update``; a test holds it to that.

    Attributes:
        shared_pool: prefixes that need not be computed although they are not cached here.
    """

    shared_pool: SharedPool | None = None

    def num_steady_steps(self, output: SchedulerOutput, limit: int) -> int:
        """Steps from ``output`` on, itself included and at most ``limit``, that are sure to be alike: all sequences
        decode, inside the blocks they have; nobody waits, ends or fills a block. It holds until a request comes or
        goes, if no drawn token ends a sequence. At least 1.
        """
        scheduled = output.scheduled
        if self._waiting or len(scheduled) != len(self._running) or scheduled[-1].num_new_tokens != 1:
            return 1
        block_size = self._kv.block_size
        for share in scheduled:
            if share.num_new_tokens != 1 or not share.samples:
                return 1
            sequence = self._by_id[share.seq_id]
            max_tokens = sequence.request.sampling_params.max_tokens
            limit = min(
                limit,
                block_size - 1 - share.num_computed_tokens % block_size,
                self._finish_rule.max_model_len - sequence.num_tokens - 1,
            )
            if max_tokens is not None:
                limit = min(limit, max_tokens - sequence.num_output_tokens - 1)
            if limit <= 1 or sequence.unstarted_indexes:
                return 1
        return limit

    def update_steady(self, output: SchedulerOutput, result: StepResult, num_steps: int) -> list[TokenDelta]:
        """``update`` for ``num_steps`` steps like ``output``, each with the same ``result``."""
        sampled = {token.seq_id: token.token_id for token in result.sampled}
        deltas = []
        for share in output.scheduled:
            sequence = self._by_id[share.seq_id]
            assert sequence.status is SequenceStatus.RUNNING
            token_ids = (sampled[share.seq_id],) * num_steps
            position = sequence.num_output_tokens
            sequence.num_computed_tokens = share.num_computed_tokens + num_steps
            sequence.token_ids.extend(token_ids)
            deltas.append(
                TokenDelta(
                    request_id=sequence.request.request_id,
                    index=sequence.index,
                    position=position,
                    token_ids=token_ids,
                    num_cached_tokens=sequence.num_cached_tokens,
                )
            )
        self._totals.num_generated_tokens += num_steps * len(output.scheduled)
        self._totals.num_steps += num_steps - 1
        return deltas

    def _introduce(self, plan: StepPlan, sequence: Sequence) -> None:
        """No executor is to be told of the tokens and blocks."""
        self._held_by_executor.add(sequence.seq_id)

    def _note_first_run(self, sequence: Sequence, matched: list[Cached], now: float) -> None:
        if self.shared_pool is not None:
            block_size = self._kv.block_size
            reusable = sequence.block_hashes[: (sequence.num_tokens - 1) // block_size]
            num_tokens = self.shared_pool.use(reusable) * block_size
            if num_tokens > sequence.num_computed_tokens:
                sequence.num_computed_tokens = num_tokens
                self._kv.commit(sequence.seq_id, sequence.block_hashes, num_tokens)
        super()._note_first_run(sequence, matched, now)
