"""Rates from totals: what was done per second, by the cluster and by each replica."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shoal_cluster.serve.block_sums import sum_blocks
from shoal_cluster.serve.dashboard.history import SAMPLE_PERIOD_S, Sample
from shoal_cluster.serve.dashboard.roster import Card
from shoal_cluster.serve.replica_state import State
from shoal_cluster.serve.rows import ClusterRow

WINDOW_S = 5.0
HIT_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests received and tokens generated per second, and the tokens by replica."""

    requests_per_s: float
    tokens_per_s: float
    tokens_per_s_of: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Totals:
    now: float
    num_requests: int
    num_tokens_of: dict[str, int]
    num_prompt_tokens_of: dict[str, int]
    num_cached_tokens_of: dict[str, int]


class Meter:
    """Observes the cluster's totals once a second. ``now`` is in seconds on a monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[_Totals] = deque(maxlen=int(HIT_WINDOW_S / SAMPLE_PERIOD_S) + 1)

    def observe(
        self, cluster: ClusterRow, cards: list[Card], num_wanted: int | None, now: float, time_s: float
    ) -> Sample | None:
        """The sample for ``time_s`` (Unix time); None at the first call, when there are no rates yet."""
        spoken = [(row.replica_id, row.stats) for row in cluster.replicas if row.stats is not None]
        totals = _Totals(
            now,
            cluster.num_requests,
            {replica_id: stats.num_generated_tokens for replica_id, stats in spoken},
            {replica_id: stats.num_prompt_tokens for replica_id, stats in spoken},
            {replica_id: stats.num_cached_tokens for replica_id, stats in spoken},
        )
        self._seen.append(totals)
        if len(self._seen) < 2:
            return None
        rates, latency = self.rates(), cluster.latency
        ttft = latency.ttft if latency is not None else None
        inter_token = latency.inter_token if latency is not None else None
        states = [card.state for card in cards]
        return Sample(
            time_s=time_s,
            requests_per_s=None if rates is None else rates.requests_per_s,
            tokens_per_s=None if rates is None else rates.tokens_per_s,
            ttft_p50_s=ttft.p50_s if ttft is not None else None,
            ttft_p95_s=ttft.p95_s if ttft is not None else None,
            inter_token_p50_s=inter_token.p50_s if inter_token is not None else None,
            inter_token_p95_s=inter_token.p95_s if inter_token is not None else None,
            attainment=latency.attainment if latency is not None else None,
            hit_rate=self.hit_rate(),
            utilization=sum_blocks(cluster.replicas).utilization,
            num_waiting=sum(stats.num_waiting for _, stats in spoken),
            waiting_tokens=sum(stats.num_waiting_tokens for _, stats in spoken),
            num_wanted=num_wanted,
            num_ready=states.count(State.READY),
            num_starting=states.count(State.STARTING),
            num_draining=states.count(State.DRAINING),
        )

    def rates(self) -> Rates | None:
        """The rates over the last ``WINDOW_S``; None before the second ``observe``."""
        if len(self._seen) < 2:
            return None
        return _between(self._seen[max(0, len(self._seen) - int(WINDOW_S / SAMPLE_PERIOD_S) - 1)], self._seen[-1])

    def hit_rate(self) -> float | None:
        """Share of the prompt tokens of the last ``HIT_WINDOW_S`` that were cached; None when none came."""
        if len(self._seen) < 2:
            return None
        before, after = self._seen[0], self._seen[-1]
        num_prompt = sum(_grown(before.num_prompt_tokens_of, after.num_prompt_tokens_of).values())
        num_cached = sum(_grown(before.num_cached_tokens_of, after.num_cached_tokens_of).values())
        return num_cached / num_prompt if num_prompt else None


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """How much each total has grown. A replica that came or went in between is left out: its share is not known."""
    return {replica_id: total - before[replica_id] for replica_id, total in after.items() if replica_id in before}


def _between(before: _Totals, after: _Totals) -> Rates:
    seconds = max(after.now - before.now, 1e-9)
    grown = _grown(before.num_tokens_of, after.num_tokens_of)
    tokens_of = {replica_id: num_tokens / seconds for replica_id, num_tokens in grown.items()}
    return Rates((after.num_requests - before.num_requests) / seconds, sum(tokens_of.values()), tokens_of)
