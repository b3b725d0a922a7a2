"""Rates out of totals: what was done per second, by the cluster and by each replica."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shoal_cluster.serve.call import ClusterRow
from shoal_cluster.serve.dashboard.history import SAMPLE_PERIOD_S, Sample
from shoal_cluster.serve.ledger import sum_blocks

WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests taken in and tokens generated per second, and the tokens by replica."""

    requests_per_s: float
    tokens_per_s: float
    tokens_per_s_of: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Totals:
    now: float
    num_requests: int
    num_tokens_of: dict[str, int]


class Meter:
    """Looks at the cluster's totals once a second. ``now`` is a monotonic clock, seconds."""

    def __init__(self) -> None:
        self._seen: deque[_Totals] = deque(maxlen=int(WINDOW_S / SAMPLE_PERIOD_S) + 1)

    def observe(self, cluster: ClusterRow, now: float, time_s: float) -> Sample | None:
        """The sample for ``time_s``, with the rates since the last look; None at the first."""
        tokens = {row.replica_id: row.stats.num_generated_tokens for row in cluster.replicas if row.stats is not None}
        self._seen.append(_Totals(now, cluster.num_requests, tokens))
        if len(self._seen) < 2:
            return None
        rates = _between(self._seen[-2], self._seen[-1])
        return Sample(
            time_s=time_s,
            requests_per_s=rates.requests_per_s,
            tokens_per_s=rates.tokens_per_s,
            utilization=sum_blocks(cluster.replicas).utilization,
            waiting_tokens=sum(row.stats.num_waiting_tokens for row in cluster.replicas if row.stats is not None),
            num_replicas=len(cluster.replicas),
            num_connected=sum(row.connected for row in cluster.replicas),
        )

    def rates(self) -> Rates | None:
        """The rates over the last ``WINDOW_S``, or None before the second look."""
        return _between(self._seen[0], self._seen[-1]) if len(self._seen) > 1 else None


def _between(before: _Totals, after: _Totals) -> Rates:
    """A replica that came or went in between counts for nothing: its share is not known."""
    seconds = max(after.now - before.now, 1e-9)
    tokens_of = {
        replica_id: (num_tokens - before.num_tokens_of[replica_id]) / seconds
        for replica_id, num_tokens in after.num_tokens_of.items()
        if replica_id in before.num_tokens_of
    }
    return Rates((after.num_requests - before.num_requests) / seconds, sum(tokens_of.values()), tokens_of)
