"""``PhaseRule`` for a gateway's calls: which phase its placements are for, and which replicas get the prompt alone."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.phases import Kind, PhaseRule
from shoal_cluster.policies.roles import Roles
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.view import ClusterView
from shoal_replica.request import Request


class Phases:
    """Owner: the gateway's ledger."""

    def __init__(self, view: ClusterView, num_gateways: int) -> None:
        self.roles = Roles(view)
        self._view = view
        self._num_gateways = num_gateways
        self.rule = PhaseRule(None, math.inf, num_gateways)

    def take_from(self, queue: PendingQueue, ttft_s: float) -> None:
        """Requests wait in ``queue``, and their first tokens have that objective."""
        self.rule = PhaseRule(queue, ttft_s, self._num_gateways)

    def of(self, request: Request, query: RouteQuery) -> RouteQuery:
        """The query as it is placed next. One that has been refused or lost, or lacks an adapter somewhere, may go to
        any replica.
        """
        if not self._view.has_roles or query.excluded:
            return query
        return self.rule.place(query, _kind(request), self._view.candidates(query.block_hashes, time.monotonic()))

    def as_sent(self, request: Request, query: RouteQuery, replica_id: str, cluster: Candidates) -> Request:
        """The request as it is sent to a replica: for its prompt alone, if that is its role and another can go on."""
        if _kind(request) != "new" or not self.rule.is_part(query, replica_id, cluster):
            return request
        self.rule.expect(query)
        return replace(request, is_prefill_only=True)

    def forget(self, request_id: str) -> None:
        """A request is over at its replica."""
        self.rule.forget(request_id)


def _kind(request: Request) -> Kind:
    """With a beam search, or a prompt that is scored, of which there are no blocks to take over, no other can go on."""
    if request.output_token_ids:
        return "begun"
    if request.sampling_params.max_tokens == 1:
        return "one token"
    return "new" if request.uses_prefix_cache and not request.sampling_params.is_beam_search else "whole"
