"""Whether to take a request at all: an early refusal with a retry time beats a place in a hopeless queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.ranking import Amounts, is_eligible
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.view import ClusterView

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
NO_REPLICA_RETRY_S = 1.0
UNKNOWN_STEP_S = 1.0  # a full step of a replica that has not computed any


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What one replica's queue may hold before it counts as full: prompt tokens to compute, and requests.

    With an ``objective``, a request is also refused once no replica could give its first token in time. The objective
    allows for the request's own prefill: the measured pace, and ``pair_s`` as in ``PrefillTime``.
    """

    max_waiting_tokens: int = 262_144
    max_waiting_requests: int = 1024
    objective: LatencyObjective | None = None
    pair_s: float = 0.0


NO_LIMITS = AdmissionLimits()


class Queued(NamedTuple):
    """What waits besides one request: prompt tokens to compute of requests held at gateways, how many requests those
    are, and prompt tokens to compute of requests that were refused lately and told when to come back.
    """

    num_tokens: int = 0
    num_requests: int = 0
    num_refused_tokens: int = 0

    def at_all(self, num_gateways: int) -> Queued:
        """Over ``num_gateways``: the others are taken to have as much as this one."""
        return Queued(*(num_gateways * count for count in self))

    def may_be_full(self, limits: AdmissionLimits) -> bool:
        """Whether it is so much that ``keep`` might let the last request in order go, where few replicas take any."""
        return self.num_requests >= limits.max_waiting_requests or self.num_tokens > limits.max_waiting_tokens


NOTHING_QUEUED = Queued()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer.

    ``retry_after_s``: seconds after which a refused request may try again; None when it was admitted, and where a retry
    is of no use: it ``never_fits`` (it needs more blocks than any replica has), or is ``never_in_time`` (its deadline
    is sooner than an idle replica could begin the answer).
    """

    admitted: bool
    reason: str
    retry_after_s: float | None = None
    never_fits: bool = False
    never_in_time: bool = False


def admit(
    query: RouteQuery,
    candidates: Candidates,
    limits: AdmissionLimits,
    queued: Queued = NOTHING_QUEUED,
) -> Admission:
    """Admit ``query``, which has just come, if some replica that can ever hold it has a queue under ``limits``.

    Reservations count as queued. So does each replica's part of ``queued``, the requests held at the gateways that go
    before it. Whether it can be in time only shows while it waits, see ``stay``. A refused request is told when there
    will be room for it behind those refused lately.
    """
    told = candidates.told
    eligible = is_eligible(query, candidates)
    if not (num_eligible := int(np.count_nonzero(eligible))):
        reason = misfit(query, candidates)
        return Admission(False, reason, never_fits=True) if reason else _none_takes_any(queued)
    tokens = told["num_waiting_tokens"] + candidates.num_reserved_tokens + np.float64(queued.num_tokens / num_eligible)
    requests = told["num_waiting"] + candidates.num_reserved + np.float64(queued.num_requests / num_eligible)
    excess_tokens, excess_requests = tokens - limits.max_waiting_tokens + 1, requests - limits.max_waiting_requests + 1
    has_room = eligible & (excess_tokens <= 0) & (excess_requests <= 0)
    if has_room.any():
        return Admission(True, f"{candidates.replica_ids[has_room.argmax()]} has room in its queue")
    reason = (
        f"every replica's queue is full ({num_eligible} replicas; the limit is {limits.max_waiting_tokens} tokens "
        f"or {limits.max_waiting_requests} requests each)"
    )
    # A queue of few tokens in many requests still takes a step for each request that leaves it.
    leaving = np.maximum(0, excess_requests) * np.maximum(1.0, tokens / np.maximum(1, requests))
    ahead = np.maximum(np.maximum(0, excess_tokens), leaving) + queued.num_refused_tokens / num_eligible
    return Admission(False, reason, _retry_after_s(float((ahead * _token_s(candidates))[eligible].min())))


def keep(query: RouteQuery, candidates: Candidates, limits: AdmissionLimits, queued: Queued) -> Admission:
    """Whether the last request in order may stay in the queue beside the others that are ``queued``: as long as some
    replica that can ever hold it has no more than its part of them. If none takes requests, no more wait than one may
    hold.

    Only the number counts: tokens do when a request comes, see ``admit``. A refused one is told when all that is held
    and was refused lately is worked off.
    """
    told = candidates.told
    eligible = is_eligible(query, candidates).nonzero()[0]
    if not eligible.size:
        return _none_takes_any(queued) if queued.may_be_full(limits) else Admission(True, "it waits for a replica")
    sent = (told["num_waiting"] + candidates.num_reserved)[eligible]
    if (sent + queued.num_requests / eligible.size < limits.max_waiting_requests).any():
        return Admission(True, f"{queued.num_requests} others wait at the gateways")
    reason = (
        f"every replica's queue is full ({eligible.size} replicas; the limit is {limits.max_waiting_requests} requests "
        "each) and all others go before it"
    )
    return Admission(False, reason, _late_retry_after_s(candidates, queued))


def stay(
    query: RouteQuery,
    candidates: Candidates,
    limits: AdmissionLimits,
    waited_s: float,
    queued: Queued = NOTHING_QUEUED,
    deadline_in_s: float = math.inf,
) -> Admission:
    """Whether a request that has been held for ``waited_s`` may go on waiting: as long as some replica could still
    meet both its objective and its deadline. If not, ``queued`` says when it may try again.
    """
    if lateness_s(query, candidates, limits, waited_s, deadline_in_s) <= 0:
        return Admission(True, f"it has waited {waited_s:.1f} s and may go on")
    allowed_s = waited_s + deadline_in_s
    if (short_s := lateness_s(query, candidates, NO_LIMITS, 0, allowed_s)) > 0:
        takes = f"its prompt alone takes {allowed_s + short_s:.3g} s where it takes least"
        reason = f"{takes}, and its deadline is {allowed_s:.3g} s"
        return Admission(False, reason, never_in_time=True)
    what = "objective or its deadline"  # each replica misses one of the two
    if lateness_s(query, candidates, limits, waited_s) > 0:
        what = "objective"
    elif lateness_s(query, candidates, NO_LIMITS, waited_s, deadline_in_s) > 0:
        what = "deadline"
    reason = f"no replica could start it in time: it has waited {waited_s:.1f} s and its {what} is lost"
    return Admission(False, reason, _late_retry_after_s(candidates, queued))


class AdmissionRecord(NamedTuple):
    """An answer with all its inputs: ``admit``'s; ``keep``'s, if the request was last in order; or ``stay``'s, for one
    that was held for ``waited_s``.
    """

    query: RouteQuery
    replicas: Candidates
    limits: AdmissionLimits
    queued: Queued
    admission: Admission
    waited_s: float | None = None
    deadline_in_s: float = math.inf
    was_last: bool = False

    def replay(self) -> Admission:
        """Answer again from the record: equal to ``admission``."""
        if self.waited_s is not None:
            return stay(self.query, self.replicas, self.limits, self.waited_s, self.queued, self.deadline_in_s)
        return (keep if self.was_last else admit)(self.query, self.replicas, self.limits, self.queued)


def overflow(
    queue: PendingQueue, queued: Queued, view: ClusterView, limits: AdmissionLimits, now: float
) -> tuple[PendingRequest, AdmissionRecord] | None:
    """The request that must leave because more is held than may be, and why: the last in order, whichever came last.
    ``queued`` is all that the gateways hold, with this one's others.
    """
    if len(queue) < 2 or not queued.may_be_full(limits) or (last := queue.last()) is None:
        return None
    candidates = view.candidates(last.query.block_hashes, now)
    admission = keep(last.query, candidates, limits, queued)
    if admission.admitted:
        return None
    return last, AdmissionRecord(last.query, candidates, limits, queued, admission, was_last=True)


def misfit(query: RouteQuery, candidates: Candidates) -> str:
    """Why no replica can ever hold ``query``; empty while one might, as may one of which nothing is known yet."""
    told = candidates.told
    largest = int(told["num_total_blocks"].max(initial=0))
    if not (len(candidates) and told["known"].all()) or query.num_blocks_needed <= largest:
        return ""
    return f"the request needs {query.num_blocks_needed} blocks and the largest replica has {largest}"


def lateness_s(
    query: RouteQuery,
    candidates: Candidates,
    limits: AdmissionLimits,
    waited_s: float,
    deadline_in_s: float = math.inf,
) -> float:
    """By how many seconds the first token of a request that has ``waited_s`` would miss its objective or its deadline,
    if it started now on the best replica; below 0 while both can be met, minus infinity while the pace of an eligible
    replica is unknown or none is eligible.
    """
    eligible, token_s = is_eligible(query, candidates), candidates.told["token_s"]
    if not (token_s[eligible] > 0).all() or not eligible.any():
        return -math.inf
    num_new = np.maximum(1, query.num_prompt_tokens - candidates.num_matched_blocks * query.block_size)
    own_s = num_new * token_s
    left_s = np.full(len(candidates), deadline_in_s)
    if limits.objective is not None:
        alone_s = own_s + limits.pair_s * num_new * (query.num_prompt_tokens - (num_new - 1) / 2)
        left_s = np.minimum(left_s, limits.objective.due_in_s(alone_s) - waited_s)
    return float((own_s - left_s)[eligible].min())


def _none_takes_any(queued: Queued) -> Admission:
    reason = f"no replica can take requests now, and {queued.num_requests} wait already"
    return Admission(False, reason, NO_REPLICA_RETRY_S)


def _late_retry_after_s(candidates: Candidates, queued: Queued) -> float:
    """When a request that was held too long may try again: by then the replicas of which something is known have worked
    off what waits now and what was refused lately.
    """
    known = candidates.told["known"]
    if not known.any():
        return NO_REPLICA_RETRY_S
    ahead = (candidates.told["num_waiting_tokens"] + candidates.num_reserved_tokens)[known]
    token_s = _token_s(candidates)[known]
    num_tokens = queued.num_tokens + queued.num_refused_tokens
    return _retry_after_s(float((ahead * token_s).mean() + num_tokens * token_s.mean() / token_s.size))


def _token_s(candidates: Candidates) -> Amounts:
    """Seconds per prompt token on each replica [n]: as measured, else by its last step as if that had been full."""
    told = candidates.told
    last_step_s = np.where(told["step_s"] > 0, told["step_s"], UNKNOWN_STEP_S)
    token_s: Amounts = np.where(told["token_s"] > 0, told["token_s"], last_step_s / told["max_num_batched_tokens"])
    return token_s


def _retry_after_s(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
