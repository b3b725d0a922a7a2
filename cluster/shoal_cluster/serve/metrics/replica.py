"""A replica's metrics: its stats as series, and the histograms that only it can fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psutil

from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics.tally import Point, Tally
from shoal_replica.reports import StepReport
from shoal_replica.stats import ReplicaStats


def stats_points(replica_id: str, stats: ReplicaStats) -> Iterator[Point]:
    """The series that ``stats`` hold. Of the free blocks, the cached ones still hold a prefix; the others are empty."""
    own = (replica_id,)
    yield Point(d.BLOCKS, (*own, "running", d.DEVICE), stats.num_allocated_blocks)
    yield Point(d.BLOCKS, (*own, "cached", d.DEVICE), stats.num_cached_blocks)
    yield Point(d.BLOCKS, (*own, "empty", d.DEVICE), stats.num_free_blocks - stats.num_cached_blocks)
    yield Point(d.BLOCKS, (*own, "cached", d.HOST), stats.num_host_cached_blocks)
    yield Point(d.BLOCKS, (*own, "empty", d.HOST), stats.num_host_blocks - stats.num_host_cached_blocks)
    yield Point(d.MOVED_BLOCKS, (*own, "out"), stats.num_blocks_out)
    yield Point(d.MOVED_BLOCKS, (*own, "in"), stats.num_blocks_in)
    yield Point(d.TRANSFERRED_BLOCKS, (*own, "out"), stats.num_blocks_given)
    yield Point(d.TRANSFERRED_BLOCKS, (*own, "in"), stats.num_blocks_taken)
    yield Point(d.SEQUENCES_NOW, (*own, "running"), stats.num_running)
    yield Point(d.SEQUENCES_NOW, (*own, "waiting"), stats.num_waiting)
    yield Point(d.WAITING_TOKENS, own, stats.num_waiting_tokens)
    yield Point(d.DRAINING, own, stats.draining)
    yield Point(d.STEPS, own, stats.num_steps)
    yield Point(d.PROMPT_TOKENS, own, stats.num_prompt_tokens)
    yield Point(d.CACHED_TOKENS, (*own, d.DEVICE), stats.num_cached_tokens - stats.num_host_cached_tokens)
    yield Point(d.CACHED_TOKENS, (*own, d.HOST), stats.num_host_cached_tokens)
    yield Point(d.GENERATED_TOKENS, own, stats.num_generated_tokens)
    yield Point(d.DRAFT_TOKENS, own, stats.num_draft_tokens)
    yield Point(d.ACCEPTED_TOKENS, own, stats.num_accepted_tokens)
    yield Point(d.FINISHED, own, stats.num_finished)
    yield Point(d.PREEMPTIONS, own, stats.num_preemptions)
    yield Point(d.REFUSALS, own, stats.num_refused)


class ReplicaMetrics:
    """Follows an engine's reports.

    Args:
        memory: bytes given to weights and to KV blocks, by kind.
    """

    def __init__(self, replica_id: str, memory: Mapping[str, int]) -> None:
        self._replica_id = replica_id
        self._memory = memory
        self._process = psutil.Process()
        self._tally = Tally((d.STEP_TIME, d.QUEUE_TIME, d.PREFILL_TIME), replica_id)
        self._steps = self._tally.histogram(d.STEP_TIME)
        self._queue = self._tally.histogram(d.QUEUE_TIME)
        self._prefill = self._tally.histogram(d.PREFILL_TIME)

    def take(self, report: StepReport) -> None:
        """Count the step that has ended, if one has, and the requests whose first token it produced."""
        if report.step_s is not None:
            self._steps.observe(report.step_s)
        for delta in report.deltas:
            if delta.start is not None:
                self._queue.observe(delta.start.queue_s)
                self._prefill.observe(delta.start.prefill_s)

    def points(self, stats: ReplicaStats) -> Iterator[Point]:
        """Every series of this replica."""
        yield from stats_points(self._replica_id, stats)
        yield from self.own_points()

    def own_points(self) -> Iterator[Point]:
        """The series that its stats do not hold."""
        yield from self._tally.points()
        yield Point(d.REPLICA_MEMORY, (self._replica_id, "resident"), self._process.memory_info().rss)
        for kind, num_bytes in self._memory.items():
            yield Point(d.REPLICA_MEMORY, (self._replica_id, kind), num_bytes)
