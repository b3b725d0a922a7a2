"""What the timelines show: a sample a second for ten minutes, then coarser ones to six hours; bounded, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean

import msgspec

FINE_S = 600.0
COARSE_S = 6 * 3600.0
BUCKET_S = 20.0
SAMPLE_PERIOD_S = 1.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one moment.

    Attributes:
        time_s: Unix time.
        requests_per_s, tokens_per_s: over the last second.
        utilization: share of all blocks that running sequences hold, in [0, 1].
        waiting_tokens: prompt tokens that no step has computed yet.
        num_replicas, num_connected: replicas that Serve runs, and those of them whose feed is open.
    """

    time_s: float
    requests_per_s: float
    tokens_per_s: float
    utilization: float
    waiting_tokens: float
    num_replicas: float
    num_connected: float


# How samples become one: rates keep their mean, loads their peak, counts whatever a glance must not miss.
_MERGE: dict[str, Callable[[Iterable[float]], float]] = {
    "requests_per_s": fmean,
    "tokens_per_s": fmean,
    "utilization": max,
    "waiting_tokens": max,
    "num_replicas": max,
    "num_connected": min,
}


class History:
    """Samples, oldest first. At most ``FINE_S`` fine ones and ``COARSE_S / BUCKET_S`` merged ones are kept."""

    def __init__(self) -> None:
        self._fine: deque[Sample] = deque()
        self._bucket: list[Sample] = []
        self._coarse: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._coarse) + len(self._fine) + bool(self._bucket)

    @property
    def latest(self) -> Sample | None:
        return self._fine[-1] if self._fine else None

    def add(self, sample: Sample) -> None:
        """Take the next sample. One that is not later than the last is dropped: the host's clock was set back."""
        if self._fine and sample.time_s <= self._fine[-1].time_s:
            return
        self._fine.append(sample)
        while self._fine[0].time_s <= sample.time_s - FINE_S:
            self._merge(self._fine.popleft())
        while self._coarse and self._coarse[0].time_s <= sample.time_s - COARSE_S:
            self._coarse.popleft()

    def since(self, time_s: float) -> list[Sample]:
        """The samples later than ``time_s``, oldest first. A gap in their times is a time without samples."""
        unfinished = [_merged(self._bucket)] if self._bucket else []
        return [s for s in (*self._coarse, *unfinished, *self._fine) if s.time_s > time_s]

    def _merge(self, sample: Sample) -> None:
        if self._bucket and sample.time_s // BUCKET_S != self._bucket[0].time_s // BUCKET_S:
            self._coarse.append(_merged(self._bucket))
            self._bucket.clear()
        self._bucket.append(sample)


def _merged(samples: list[Sample]) -> Sample:
    """One sample for several, dated by the last."""
    merged = {name: merge([getattr(s, name) for s in samples]) for name, merge in _MERGE.items()}
    return Sample(time_s=samples[-1].time_s, **merged)
