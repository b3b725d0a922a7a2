"""Whether to take a request at all: better an early refusal with a date than a place in a hopeless queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.policies.view import ReplicaView
from shoal_replica.stats import ReplicaStats

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
NO_REPLICA_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What one replica's queue may hold before it counts as full: prompt tokens to compute, and requests."""

    max_waiting_tokens: int = 262_144
    max_waiting_requests: int = 1024


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer.

    ``retry_after_s`` is when a refused request may try again; None when it was admitted or ``never_fits``: it needs
    more blocks than any replica has, so the request itself is wrong.
    """

    admitted: bool
    reason: str
    retry_after_s: float | None = None
    never_fits: bool = False


def admit(query: RouteQuery, replicas: Sequence[ReplicaView], limits: AdmissionLimits, now: float) -> Admission:
    """Admit ``query`` if one replica that can ever hold it has a queue under ``limits``.

    ``now`` dates the answer for policies with deadlines; this one counts queues only. Reservations count as queued.
    """
    pools = [r.stats.num_total_blocks for r in replicas if r.stats is not None]
    if pools and query.num_blocks_needed > max(pools):
        reason = f"the request needs {query.num_blocks_needed} blocks and the largest replica has {max(pools)}"
        return Admission(False, reason, never_fits=True)
    queues = [
        (row, row.stats)
        for row in replicas
        if row.stats is not None
        and row.connected
        and not row.stats.draining
        and row.replica_id not in query.excluded
        and query.num_blocks_needed <= row.stats.num_total_blocks
    ]
    if not queues:
        return Admission(False, "no replica can take requests now", NO_REPLICA_RETRY_S)
    waits_s = []
    for row, stats in queues:
        excess_tokens = _excess_tokens(row, stats, limits)
        if excess_tokens == 0:
            return Admission(True, f"{row.replica_id} has room in its queue")
        waits_s.append(_seconds(excess_tokens, stats))
    reason = (
        f"every replica's queue is full ({len(queues)} replicas; the limit is {limits.max_waiting_tokens} tokens "
        f"or {limits.max_waiting_requests} requests each)"
    )
    return Admission(False, reason, min(max(min(waits_s), MIN_RETRY_S), MAX_RETRY_S))


def _excess_tokens(row: ReplicaView, stats: ReplicaStats, limits: AdmissionLimits) -> float:
    """Tokens the replica must compute before its queue is under both limits; 0 when it is."""
    tokens = stats.num_waiting_tokens + row.num_reserved_tokens
    requests = stats.num_waiting + row.num_reserved
    excess: float = max(0, tokens - limits.max_waiting_tokens + 1)
    excess_requests = requests - limits.max_waiting_requests + 1
    if excess_requests > 0:
        # A short queue of tokens that holds many requests still takes a step each time one leaves it.
        excess = max(excess, excess_requests * max(1.0, tokens / requests))
    return excess


def _seconds(num_tokens: float, stats: ReplicaStats) -> float:
    """How long the replica takes for ``num_tokens`` at its last step's pace: a full budget of tokens a step."""
    return num_tokens / stats.max_num_batched_tokens * (stats.step_s or NO_REPLICA_RETRY_S)
