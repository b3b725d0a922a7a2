"""Which phase of a request a placement is for, where replicas have roles."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.roles import Handovers, Roles, phase_at_arrival
from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.policies.view import ClusterView
from shoal_replica.request import Request


class Phases:
    """Owner: the gateway's ledger."""

    def __init__(self, view: ClusterView) -> None:
        self.roles = Roles(view)
        self._view = view
        self._handovers = Handovers()
        self._queue: PendingQueue | None = None
        self._ttft_s = math.inf

    def take_from(self, queue: PendingQueue, ttft_s: float) -> None:
        """Requests wait in ``queue``, and their first tokens have that objective."""
        self._queue, self._ttft_s = queue, ttft_s

    def of(self, request: Request, query: RouteQuery) -> RouteQuery:
        """The query as it is placed next. One that has been refused or lost, or lacks an adapter somewhere, may go to
        any replica.
        """
        if query.excluded or not self._view.has_roles:
            return query
        cluster = self._view.candidates(query.block_hashes, time.monotonic())
        if request.output_token_ids:
            return replace(query, phase="decode" if self._can_decode(query, cluster) else "")
        if not _has_parts(request) and request.sampling_params.max_tokens != 1:
            return replace(query, phase="decode")
        num_held_tokens = 0 if self._queue is None else self._queue.num_tokens
        phase = phase_at_arrival(query, cluster, num_held_tokens, self._ttft_s)
        return replace(query, phase=phase, decode_steps=1 if phase == "prefill" else query.decode_steps)

    def as_sent(self, request: Request, query: RouteQuery, replica_id: str, cluster: Candidates) -> Request:
        """The request as it is sent to a replica: for its prompt alone, if that is its role and another can go on."""
        is_prefill = cluster.states[cluster.place(replica_id)].role == "prefill"
        if not (is_prefill and _has_parts(request) and self._can_decode(query, cluster)):
            return request
        self._handovers.expect(query)
        return replace(request, is_prefill_only=True)

    def forget(self, request_id: str) -> None:
        """A request is over at its replica."""
        self._handovers.forget(request_id)

    def _can_decode(self, query: RouteQuery, cluster: Candidates) -> bool:
        num_held_blocks = 0 if self._queue is None else self._queue.num_blocks_to_decode
        return self._handovers.have_room(query, cluster, num_held_blocks)


def _has_parts(request: Request) -> bool:
    """Whether another replica can go on with it after its first token: not with a beam search, nor with a prompt that
    is scored, of which there are no blocks to take over.
    """
    params = request.sampling_params
    has_more = params.max_tokens != 1 and not request.output_token_ids
    return has_more and request.is_cached and not params.is_beam_search
