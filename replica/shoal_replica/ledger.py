"""A replica's ledger: the numbers of blocks, sequences and waiting tokens that it reports after each step."""

from __future__ import annotations

from collections.abc import Sequence as Items

from shoal_replica.config import SchedulerConfig
from shoal_replica.kv_cache import Cached, KVCacheManager
from shoal_replica.prefill_pace import Pace
from shoal_replica.request import GOES_ON, FinishReason, Sequence, SequenceStatus
from shoal_replica.scheduling_policy import by_progress, due_profile
from shoal_replica.stats import ReplicaStats, Totals
from shoal_replica.waiting_queue import WaitingQueue


class Ledger:
    """Reads the scheduler's own data structures, as they change."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: Items[Sequence],
        waiting: WaitingQueue,
        totals: Totals,
    ) -> None:
        self._config = config
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._totals = totals

    def stats(
        self, now: float, time_s: float, step_s: float, draining: bool, busy_s: float, pace: Pace
    ) -> ReplicaStats:
        """The stats as of ``now`` on the engine's clock, which is ``time_s`` on the wall clock."""
        pool, host = self._kv.pool, self._kv.host
        behind, level = by_progress(self._running)
        return ReplicaStats(
            time_s=time_s,
            block_size=self._kv.block_size,
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_allocated_blocks=pool.num_allocated,
            num_cached_blocks=pool.num_cached,
            num_host_blocks=host.num_rows,
            num_host_cached_blocks=len(host),
            num_blocks_out=host.num_out,
            num_blocks_in=host.num_in,
            num_running=len(self._running),
            num_waiting=self._waiting.num_all,
            num_waiting_tokens=self._waiting.num_tokens + sum(s.num_behind for s in behind) + len(level),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            step_s=step_s,
            busy_s=busy_s,
            token_s=pace.token_s,
            full_token_s=pace.full_token_s,
            **self._totals.as_dict(),
            draining=draining,
            by_due=self._config.policy == "deadline",
            due_tokens=due_profile((*behind, *self._waiting), now, self._config.policy),
        )

    def note_run(self, sequence: Sequence, matched: list[Cached], now: float) -> None:
        """A waiting sequence runs. The first time it is started and its prompt counted; of a request moved here, only
        the prompt tokens to compute: its transferred blocks would otherwise look like cache hits.
        """
        if sequence.first_scheduled_s is not None:
            return
        sequence.start(now)
        num_prompt, num_cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        if sequence.request.output_token_ids:
            self._totals.note_start(num_prompt - num_cached, 0, 0)
        else:
            num_from_host = sum(not isinstance(block, int) for block in matched) * self._kv.block_size
            self._totals.note_start(num_prompt, num_cached, num_from_host)

    def note_end(self, sequence: Sequence, reason: FinishReason, is_last: bool) -> None:
        """A sequence is over here; ``is_last`` of its request. That counts once, wherever its sequences have gone: with
        number 0, where that does not go on elsewhere; a search, which stays, with its last beam.
        """
        is_search = sequence.request.sampling_params.is_beam_search
        counts = is_last if is_search else sequence.index == 0
        self._totals.num_finished += counts and reason not in GOES_ON

    def check_invariants(self) -> None:
        """Queues, statuses and block tables agree; an idle scheduler holds no block."""
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            table = self._kv.block_table(sequence.seq_id)
            assert len(table) >= self._kv.num_blocks_for(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens < sequence.num_tokens
        for sequence in self._waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        assert len(self._running) <= self._config.max_num_seqs
        self._waiting.check_invariants()
        if not self._running and not self._kv.has_guests:
            assert self._kv.pool.num_allocated == 0
