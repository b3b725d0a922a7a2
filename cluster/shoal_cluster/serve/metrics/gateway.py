"""A gateway's metrics: what it counts of its own calls, and what it knows of its replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import psutil

from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.call_times import HANDOVER_REASONS
from shoal_cluster.serve.latency_window import LatencyWindow
from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics.model_tally import ModelTally
from shoal_cluster.serve.metrics.tally import Point, Tally
from shoal_cluster.serve.rows import ReplicaRow
from shoal_cluster.serve.view_tally import ViewQuality

NUM_RECENT = 512


class GatewayMetrics:
    """Counts tokens, ended calls and routing decisions as they happen, on one event loop. Implements TokenWatch.

    Args:
        names: the model's, then its adapters'.
    """

    def __init__(self, gateway_id: str, names: Sequence[str], window: LatencyWindow) -> None:
        own = (f for f in d.FAMILIES if f.source is d.Source.GATEWAY and f not in (*d.BY_VIEW, *d.BY_MODEL))
        self.tally = Tally(own, gateway_id)
        self.by_model = ModelTally(gateway_id, names)
        self.window = window
        self.num_active = 0
        self._gateway_id = gateway_id
        self._ttft = self.tally.histogram(d.TTFT)
        self._inter_token = self.tally.histogram(d.INTER_TOKEN)
        self._process = psutil.Process()
        self.recent_ttft_s: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def num_requests(self) -> int:
        """All requests that have arrived, including those in progress."""
        return self.num_active + int(self.tally.count(d.REQUESTS))

    @property
    def num_shed(self) -> int:
        return int(self.tally.count(d.REQUESTS, RequestOutcome.SHED))

    @property
    def num_failed(self) -> int:
        return int(sum(self.tally.count(d.REQUESTS, o) for o in (RequestOutcome.FAILED, RequestOutcome.DEADLINE)))

    @property
    def num_resumes(self) -> int:
        return int(self.tally.count(d.RESUMES))

    def add_first_token(self, seconds: float, now: float) -> None:
        self._ttft.observe(seconds)
        self.recent_ttft_s.append(seconds)
        self.window.add_first_token(seconds, now)

    def add_tokens(self, seconds: float, num_tokens: int, now: float) -> None:
        self._inter_token.observe(seconds, num_tokens)
        self.window.add_tokens(seconds, num_tokens, now)

    def add_unread(self) -> None:
        """Count a call that could not be parsed: there is no more to observe of it."""
        self.tally.inc(d.REQUESTS, RequestOutcome.INVALID)

    def add_stall(self) -> None:
        """Count a replica that has stalled."""
        self.tally.inc(d.STALLS)

    def add_call(self, record: CallRecord) -> None:
        """Count a call that is over. Those that ended by the client's doing say nothing about the objective."""
        outcome = record.outcome
        met = outcome is RequestOutcome.FINISHED and self.window.objective.is_met(record.ttft_s, record.inter_token_s)
        self.tally.inc(d.REQUESTS, outcome)
        if outcome not in (RequestOutcome.INVALID, RequestOutcome.CANCELLED):
            self.window.add_request(met, record.ended_s)
        if outcome is RequestOutcome.FINISHED:
            self.tally.histogram(d.REQUEST_TIME).observe(record.duration_s)
            self.tally.inc(d.WITHIN_OBJECTIVE, by=met)
        for reason in record.finish_reasons:
            self.tally.inc(d.SEQUENCES, reason)
        if record.usage is not None:
            self.tally.inc(d.RESUMES, by=record.usage.num_resumes)
            if outcome is not RequestOutcome.INVALID:  # a replica, too, may find that it is
                self.by_model.add(record.model, record.usage)  # what is not served has none
        for leg in record.legs:
            if leg.end in HANDOVER_REASONS:
                self.tally.inc(d.HANDOVERS, leg.end)
        if record.placement_s is not None:
            self.tally.histogram(d.PLACEMENT).observe(record.placement_s)

    def add_decision(self, record: RouteRecord) -> None:
        self.tally.inc(d.DECISIONS, decision_reason(record))
        if best := record.decision.best:  # ``ranked`` would sort all candidates
            self.tally.histogram(d.VIEW_AGE).observe(record.replicas.age_of(best))

    def points(self, replicas: Iterable[ReplicaRow], quality: ViewQuality, index: PrefixIndex) -> Iterator[Point]:
        """The gateway's own series, including those of its view of the replicas."""
        own = (self._gateway_id,)
        yield from self.tally.points()
        yield from self.by_model.points()
        yield Point(d.PLACED_TOKENS, own, quality.num_prompt_tokens)
        yield Point(d.PREDICTED_TOKENS, own, quality.num_predicted_tokens)
        yield Point(d.FOUND_TOKENS, own, quality.num_cached_tokens)
        yield Point(d.INDEX_ENTRIES, own, len(index))
        yield Point(d.INDEX_EVICTED, own, index.num_evicted)
        yield Point(d.ACTIVE, own, self.num_active)
        yield Point(d.GATEWAY_MEMORY, own, self._process.memory_info().rss)
        for row in replicas:
            labels = (self._gateway_id, row.replica_id)
            yield Point(d.CONNECTED, labels, row.connected)
            yield Point(d.STALLED, labels, row.stalled)
            yield Point(d.SLOWNESS, labels, row.slowness)
            yield Point(d.FEED_AGE, labels, row.age_s)
            yield Point(d.RESERVED, labels, row.num_reserved_blocks)


def decision_reason(record: RouteRecord) -> d.DecisionReason:
    """The one-word reason for a decision; its record has the details."""
    best = record.decision.best
    if not best:
        return d.DecisionReason.UNPLACED
    if record.decision.num_ranked == 1:
        return d.DecisionReason.ONLY
    matched = record.replicas.num_matched_blocks
    told_apart = record.replicas.matched_by(best) == matched.max() > matched.min()
    return d.DecisionReason.PREFIX if told_apart else d.DecisionReason.LOAD
