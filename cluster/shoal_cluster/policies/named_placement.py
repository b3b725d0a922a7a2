"""Placement by another system's rule instead of ours: nothing is held, each request is sent when it arrives."""

from __future__ import annotations

import math
from random import Random

from shoal_cluster.policies.baselines import ROUTINGS, USE_SENT_BLOCKS, NamedRule, Routing
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.memory import RoutingMemory
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import OWN_RULE, RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_replica.errors import ConfigError


def placement_by(name: str) -> NamedPlacement | None:
    """The placement by the rule of that name; None for our own. Raises ConfigError if there is no such rule."""
    for routing in ROUTINGS:
        if routing == name:
            return None if routing == OWN_RULE else NamedPlacement(routing)
    raise ConfigError(f"routing.rule: got {name!r}; must be one of {', '.join(ROUTINGS)}")


class NamedPlacement:
    """Decides by the rule of that name and keeps what the rule remembers. Owned by one gateway."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._memory = RoutingMemory()

    def rule_for(self, query: RouteQuery, candidates: Candidates) -> NamedRule:
        """The rule with what it remembers that bears on ``query``."""
        return NamedRule(self.routing, self._memory.recall(query, candidates))

    def note(self, query: RouteQuery, replica_id: str) -> None:
        """Remember that ``query`` goes to ``replica_id``."""
        self._memory.note(query, replica_id, with_blocks=self.routing in USE_SENT_BLOCKS)

    def dispatch(
        self, pending: PendingRequest, view: ClusterView, weights: RouteWeights, now: float, rng: Random
    ) -> Dispatch | None:
        """Where ``pending`` goes now; None while no replica is eligible."""
        query = pending.query
        candidates = view.candidates(query.block_hashes, now)
        rule, seed = self.rule_for(query, candidates), rng.getrandbits(32)
        decision = rule.decide(query, candidates, weights, Random(seed))
        if not decision.ranked:
            return None
        self.note(query, decision.best)
        return Dispatch(pending, math.inf, candidates, seed, decision, None, rule)

    def forget(self, replica_id: str) -> None:
        """A replica has left."""
        self._memory.forget(replica_id)
