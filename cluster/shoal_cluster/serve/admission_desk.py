"""The gateway's side of admission: which requests may wait here, and what the others' clients are told."""

from __future__ import annotations

import math
import time

from shoal_cluster.config import ClusterConfig
from shoal_cluster.policies.admission import (
    NOTHING_QUEUED,
    Admission,
    AdmissionLimits,
    AdmissionRecord,
    Queued,
    admit,
    lateness_s,
    misfit,
    overflow,
    stay,
)
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.returning import Returning
from shoal_cluster.policies.route_query import uncached_tokens
from shoal_cluster.serve.explanation import Refusal
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ShoalError, Unavailable


def limits_of(config: ClusterConfig, hold: HoldConfig) -> AdmissionLimits:
    """The limits that the configuration sets; an objective is one only with ``shed_late``."""
    return AdmissionLimits(
        max_waiting_tokens=config.gateway.max_waiting_tokens,
        max_waiting_requests=config.replica.max_num_waiting,
        objective=hold.objective if config.gateway.shed_late else None,
        pair_s=hold.prefill.pair_s,
    )


class AdmissionDesk:
    """Asks the policy about requests in ``queue`` and puts each refusal on record, with what it takes to replay it."""

    def __init__(self, ledger: GatewayLedger, queue: PendingQueue, limits: AdmissionLimits) -> None:
        self._ledger = ledger
        self._queue = queue
        self.limits = limits
        self._returning = Returning()

    def can_take(self, pending: PendingRequest) -> bool:
        """Whether some replica takes requests now and is large enough for this one."""
        return bool(is_eligible(pending.query, self._ledger.view.present(time.monotonic())).any())

    def check_size(self, pending: PendingRequest) -> None:
        """Raise InvalidArgument if no replica has enough blocks for a request."""
        candidates = self._ledger.view.candidates((), time.monotonic())
        if reason := misfit(pending.query, candidates):
            admission = Admission(False, reason, never_fits=True)
            self._obey(AdmissionRecord(pending.query, candidates, self.limits, NOTHING_QUEUED, admission), pending)

    def check_newcomer(self, pending: PendingRequest) -> None:
        """Check a request that has just come, is in the queue and cannot start at once.

        Raises:
            InvalidArgument: no replica has enough blocks.
            ResourceExhausted: too much goes before it.
        """
        query, now = pending.query, time.monotonic()
        candidates = self._ledger.view.candidates(query.block_hashes, now)
        can_go = bool(is_eligible(query, candidates).any())
        if not can_go:
            self.check_size(pending)
        self._queue.know_match(query.request_id, candidates)
        if can_go:
            queued = self._at_all_gateways(*self._queue.before(query.request_id))
            admission = admit(query, candidates, self.limits, queued)
            self._obey(AdmissionRecord(query, candidates, self.limits, queued, admission), pending)

    def overflow(self) -> tuple[PendingRequest, ShoalError] | None:
        """The request that must leave because more is held than may be, and what its client is told: the last in order,
        whichever came last.
        """
        queued = self._at_all_gateways(self._queue.num_tokens, len(self._queue) - 1)
        found = overflow(self._queue, queued, self._ledger.view, self.limits, time.monotonic())
        if found is None:
            return None
        last, record = found
        return last, self._error(record, last)

    def time_left_s(self, pending: PendingRequest) -> float:
        """Seconds until a held request's objective or deadline is lost. Once one is, raises what its client is told."""
        query, limits = pending.query, self.limits
        if (limits.objective is None and pending.deadline_s == math.inf) or pending.priority == RESUMED_PRIORITY:
            return math.inf
        now = time.monotonic()
        waited_s, left_s = now - pending.arrival_s, pending.deadline_s - now
        candidates = self._ledger.view.candidates(query.block_hashes, now)
        late_s = lateness_s(query, candidates, limits, waited_s, left_s)
        if late_s > 0:
            queued = self._at_all_gateways(self._queue.num_tokens, len(self._queue))
            admission = stay(query, candidates, limits, waited_s, queued, left_s)
            self._obey(AdmissionRecord(query, candidates, limits, queued, admission, waited_s, left_s), pending)
        return -late_s

    def unavailable(self, pending: PendingRequest, reason: str) -> ShoalError:
        """The error for a request that no replica comes for, on record."""
        candidates = self._ledger.view.candidates(pending.query.block_hashes, time.monotonic())
        return self._refused(pending, candidates, Unavailable(reason))

    def _at_all_gateways(self, num_tokens: int, num_requests: int) -> Queued:
        queued = Queued(num_tokens, num_requests, self._returning.num_tokens(time.monotonic()))
        return queued.at_all(self._ledger.num_gateways)

    def _obey(self, record: AdmissionRecord, pending: PendingRequest) -> None:
        """Raise the error that the client gets if the request was refused."""
        if not record.admission.admitted:
            raise self._error(record, pending)

    def _error(self, record: AdmissionRecord, pending: PendingRequest) -> ShoalError:
        admission = record.admission
        error: ShoalError = ResourceExhausted(admission.reason, admission.retry_after_s)
        if admission.never_fits:
            error = InvalidArgument("prompt", f"{pending.query.num_prompt_tokens} tokens", admission.reason)
        elif admission.never_in_time:
            error = DeadlineExceeded(admission.reason)
        elif admission.retry_after_s is not None:
            num_new_tokens = uncached_tokens(record.query, int(record.replicas.num_matched_blocks.max(initial=0)))
            self._returning.note(num_new_tokens, time.monotonic() + admission.retry_after_s)
        return self._refused(pending, record.replicas, error, record)

    def _refused(
        self, pending: PendingRequest, candidates: Candidates, error: ShoalError, record: AdmissionRecord | None = None
    ) -> ShoalError:
        """Record the refusal and return ``error``."""
        waiting = candidates.told["num_waiting_tokens"] + candidates.num_reserved_tokens
        terms = (
            ("prompt_tokens", pending.query.num_prompt_tokens),
            ("waited_s", time.monotonic() - pending.arrival_s),
            ("held_requests", len(self._queue)),
            ("held_tokens", self._queue.num_tokens),
            ("replicas", len(candidates)),
            ("least_waiting_tokens", int(waiting.min()) if len(candidates) else 0),
        )
        request_id = pending.query.request_id
        self._ledger.routes.refuse(Refusal.of(error, time.time(), request_id, terms, record))
        return error
