"""Requests that one simulated replica begins and another goes on with, where replicas have roles."""

from __future__ import annotations

from shoal_cluster.policies.block_offer import BlockOffer, best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.phases import Kind, PhaseRule
from shoal_cluster.policies.roles import Roles
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.view import ClusterView


class SimPhases:
    """One gateway's part in them: it gives replicas their roles, and knows where a request's blocks are."""

    def __init__(self, view: ClusterView, rule: PhaseRule, prefill_share: float) -> None:
        self.roles = Roles(view)
        self.roles.share = prefill_share
        self.rule = rule
        self._view = view
        self._left: dict[str, str] = {}  # by request: the replica that has computed its prompt

    def of(self, query: RouteQuery, kind: Kind, now: float) -> RouteQuery:
        """The query as it is placed next: for its prompt alone, for what follows, or for both."""
        if self._left.get(query.request_id, "") in self._view:
            query = query.with_blocks_given(len(query.block_hashes))
        if not self._view.has_roles or query.excluded:
            return query
        return self.rule.place(query, kind, self._view.candidates(query.block_hashes, now))

    def note_prefilled(self, request_id: str, replica_id: str) -> None:
        """A replica has computed a request's prompt; another goes on."""
        self._left[request_id] = replica_id
        self.rule.forget(request_id)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._left.pop(request_id, None)
        self.rule.forget(request_id)

    def offer(self, query: RouteQuery, candidates: Candidates, replica_id: str) -> BlockOffer | None:
        """Who has more of a request's blocks than the replica where it goes."""
        left = self._left.get(query.request_id)
        if left is not None and left != replica_id and left in self._view:
            return BlockOffer(left, len(query.block_hashes))
        return best_offer(candidates, replica_id)
