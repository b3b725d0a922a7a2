"""What a replica remembers of its past, so that a new gateway's timelines do not start empty."""

from __future__ import annotations

from collections import deque

import msgspec

from shoal_cluster.serve.past_sample import PAST_BUCKET_S, PAST_S, PastSample
from shoal_replica.engine import Engine
from shoal_replica.reports import StepReport
from shoal_replica.stats import ReplicaStats


class ReplicaPast:
    """Follows an engine from now on; keeps ``PAST_S`` seconds. An idle engine renews its stats once a second."""

    def __init__(self, engine: Engine) -> None:
        self._kept: deque[PastSample] = deque(maxlen=int(PAST_S / PAST_BUCKET_S))
        self._first = self._last = self._peak = engine.stats()
        engine.subscribe(self._take)

    def samples(self) -> list[PastSample]:
        """Complete buckets, oldest first."""
        return list(self._kept)

    def encoded(self) -> bytes:
        """``samples()`` for ``decode_past``."""
        return msgspec.msgpack.encode(self.samples())

    def _take(self, report: StepReport) -> None:
        self.add(report.stats)

    def add(self, stats: ReplicaStats) -> None:
        """Count ``stats`` in. A bucket is closed by the first stats of the next."""
        if stats.time_s // PAST_BUCKET_S != self._first.time_s // PAST_BUCKET_S:
            self._close()
            self._first = self._peak = stats
        elif _load(stats) > _load(self._peak):
            self._peak = stats
        self._last = stats

    def _close(self) -> None:
        seconds = max(self._last.time_s - self._first.time_s, 1.0)
        self._kept.append(
            PastSample(
                time_s=round((self._first.time_s // PAST_BUCKET_S + 1) * PAST_BUCKET_S, 3),
                tokens_per_s=round((self._last.num_generated_tokens - self._first.num_generated_tokens) / seconds, 2),
                num_allocated_blocks=self._peak.num_allocated_blocks,
                num_total_blocks=self._peak.num_total_blocks,
                num_waiting=self._peak.num_waiting,
                num_waiting_tokens=self._peak.num_waiting_tokens,
            )
        )


def _load(stats: ReplicaStats) -> tuple[int, int]:
    """What peaks are compared by: blocks held, then tokens waiting."""
    return stats.num_allocated_blocks, stats.num_waiting_tokens
