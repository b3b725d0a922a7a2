"""Timelines from before this gateway, put together from what the replicas remember of their past."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.past_sample import PastSample


def recalled(pasts: Iterable[Sequence[PastSample]]) -> list[Sample]:
    """The cluster's samples, oldest first: for each time, sums over the replicas that remember it.

    A replica that is gone reports nothing, so these are lower bounds. Latencies, hit rates and requests were known to
    the former gateway only, and are left out.
    """
    together: dict[float, list[PastSample]] = defaultdict(list)
    for past in pasts:
        for sample in past:
            together[sample.time_s].append(sample)
    return [_sum(time_s, together[time_s]) for time_s in sorted(together)]


def _sum(time_s: float, samples: list[PastSample]) -> Sample:
    num_blocks = sum(s.num_total_blocks for s in samples)
    return Sample(
        time_s=time_s,
        tokens_per_s=sum(s.tokens_per_s for s in samples),
        utilization=sum(s.num_allocated_blocks for s in samples) / num_blocks if num_blocks else 0.0,
        num_waiting=sum(s.num_waiting for s in samples),
        waiting_tokens=sum(s.num_waiting_tokens for s in samples),
        num_ready=len(samples),
    )
