"""Whether to take a request at all: better an early refusal with a date than a place in a hopeless queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.ranking import Amounts, RouteQuery, is_eligible

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


def admit(query: RouteQuery, candidates: Candidates, limits: AdmissionLimits, now: float) -> Admission:
    """Admit ``query`` if one replica that can ever hold it has a queue under ``limits``.

    ``now`` dates the answer for policies with deadlines; this one counts queues only. Reservations count as queued.
    """
    told = candidates.told
    largest = int(told["num_total_blocks"].max(initial=0))
    if told["known"].any() and query.num_blocks_needed > largest:
        reason = f"the request needs {query.num_blocks_needed} blocks and the largest replica has {largest}"
        return Admission(False, reason, never_fits=True)
    eligible = np.flatnonzero(is_eligible(query, candidates))
    if not eligible.size:
        return Admission(False, "no replica can take requests now", NO_REPLICA_RETRY_S)
    excess = _excess_tokens(candidates, limits)[eligible]
    best = int(excess.argmin())
    if excess[best] == 0:
        return Admission(True, f"{candidates.replica_ids[eligible[best]]} has room in its queue")
    reason = (
        f"every replica's queue is full ({eligible.size} replicas; the limit is {limits.max_waiting_tokens} tokens "
        f"or {limits.max_waiting_requests} requests each)"
    )
    # How long each takes for its excess at its last step's pace: a full budget of tokens a step.
    pace_s = np.where(told["step_s"] > 0, told["step_s"], NO_REPLICA_RETRY_S) / told["max_num_batched_tokens"]
    wait_s = float((excess * pace_s[eligible]).min())
    return Admission(False, reason, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))


def _excess_tokens(candidates: Candidates, limits: AdmissionLimits) -> Amounts:
    """Tokens each replica must compute before its queue is under both limits; 0 where it is."""
    told = candidates.told
    tokens = told["num_waiting_tokens"] + candidates.num_reserved_tokens
    requests = told["num_waiting"] + candidates.num_reserved
    # A short queue of tokens that holds many requests still takes a step each time one leaves it.
    tokens_each = np.maximum(1.0, tokens / np.maximum(1, requests))
    excess: Amounts = np.maximum(
        np.maximum(0, tokens - limits.max_waiting_tokens + 1),
        np.maximum(0, requests - limits.max_waiting_requests + 1) * tokens_each,
    )
    return excess
