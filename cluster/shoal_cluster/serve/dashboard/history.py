"""What the timelines show: a sample a second for ten minutes, then coarser ones up to six hours; bounded, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import msgspec

from shoal_cluster.serve.past_sample import PAST_BUCKET_S, PAST_S

FINE_S = 600.0
SAMPLE_PERIOD_S = 1.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one moment. None means unknown, or that there was nothing to measure.

    Attributes:
        time_s: Unix time.
        requests_per_s, tokens_per_s: over the meter's last five seconds.
        ttft_*_s, inter_token_*_s, attainment: of the latency window, as clients of this gateway saw it.
        hit_rate: share of prompt tokens found in a prefix cache, over the meter's window.
        utilization: share of all blocks that running sequences hold, in [0, 1].
        num_waiting, waiting_tokens: sequences that wait; prompt tokens that no step has computed yet.
        num_wanted, num_ready, num_starting, num_draining: replicas wanted by the autoscaler, and by state.
    """

    time_s: float
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p95_s: float | None = None
    attainment: float | None = None
    hit_rate: float | None = None
    utilization: float | None = None
    num_waiting: float | None = None
    waiting_tokens: float | None = None
    num_wanted: float | None = None
    num_ready: float | None = None
    num_starting: float | None = None
    num_draining: float | None = None


# How samples are merged: rates and medians keep their mean; loads, p95s and counts their peak; attainment and the
# number of ready replicas, which should be high, their minimum.
_MERGE: dict[str, Callable[[Iterable[float]], float]] = {
    "requests_per_s": fmean,
    "tokens_per_s": fmean,
    "ttft_p50_s": fmean,
    "ttft_p95_s": max,
    "inter_token_p50_s": fmean,
    "inter_token_p95_s": max,
    "attainment": min,
    "hit_rate": fmean,
    "utilization": max,
    "num_waiting": max,
    "waiting_tokens": max,
    "num_wanted": max,
    "num_ready": min,
    "num_starting": max,
    "num_draining": max,
}


class History:
    """Samples, oldest first: as they came for ``FINE_S`` seconds, then one per ``PAST_BUCKET_S`` for ``PAST_S``."""

    def __init__(self) -> None:
        self._fine: deque[Sample] = deque()
        self._bucket: list[Sample] = []
        self._coarse: deque[Sample] = deque()
        self._begin_s: float | None = None

    def __len__(self) -> int:
        return len(self._coarse) + len(self._fine) + bool(self._bucket)

    @property
    def latest(self) -> Sample | None:
        return self._fine[-1] if self._fine else None

    def add(self, sample: Sample) -> None:
        """Add the next sample. One that is not later than the last is dropped: the host's clock was set back."""
        if self._fine and sample.time_s <= self._fine[-1].time_s:
            return
        if self._begin_s is None:
            self._begin_s = sample.time_s
        self._fine.append(sample)
        while self._fine[0].time_s <= sample.time_s - FINE_S:
            self._merge(self._fine.popleft())
        self._drop_old(sample.time_s)

    def recall(self, samples: Sequence[Sample]) -> None:
        """Put ``samples`` (oldest first, ``PAST_BUCKET_S`` apart) before the first one added, replacing older ones."""
        begin_s = float("inf") if self._begin_s is None else self._begin_s
        own = [sample for sample in self._coarse if sample.time_s >= begin_s]
        self._coarse = deque([*(s for s in samples if s.time_s < begin_s), *own])
        if self._coarse:
            self._drop_old(self._fine[-1].time_s if self._fine else self._coarse[-1].time_s)

    def since(self, time_s: float) -> list[Sample]:
        """The samples later than ``time_s``, oldest first. A gap in their times means that none were taken then."""
        unfinished = [_merged(self._bucket)] if self._bucket else []
        return [s for s in (*self._coarse, *unfinished, *self._fine) if s.time_s > time_s]

    def _merge(self, sample: Sample) -> None:
        if self._bucket and sample.time_s // PAST_BUCKET_S != self._bucket[0].time_s // PAST_BUCKET_S:
            self._coarse.append(_merged(self._bucket))
            self._bucket.clear()
        self._bucket.append(sample)

    def _drop_old(self, now_s: float) -> None:
        while self._coarse and self._coarse[0].time_s <= now_s - PAST_S:
            self._coarse.popleft()


def _merged(samples: list[Sample]) -> Sample:
    """Merge several samples into one, dated by the last."""
    merged: dict[str, float | None] = {}
    for name, merge in _MERGE.items():
        known = [value for value in (getattr(s, name) for s in samples) if value is not None]
        merged[name] = merge(known) if known else None
    return Sample(time_s=samples[-1].time_s, **merged)
