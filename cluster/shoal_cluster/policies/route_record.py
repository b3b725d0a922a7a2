"""A placement decision with all its inputs, so that it can be explained and decided again."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import NamedTuple, Protocol

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import OWN_RULE, RouteWeights, choose, route


class Rule(Protocol):
    """A placement rule that decides in place of ``route``; see ``baselines.NamedRule``."""

    @property
    def routing(self) -> str: ...

    def decide(
        self, query: RouteQuery, candidates: Candidates, weights: RouteWeights, rng: Random
    ) -> RouteDecision: ...


class RouteRecord(NamedTuple):
    """A decision with all its inputs. ``time_s`` is wall-clock time, for display only. Without a ``rule``, ``route``
    decided.
    """

    time_s: float
    query: RouteQuery
    replicas: Candidates
    weights: RouteWeights
    seed: int
    decision: RouteDecision
    rule: Rule | None = None

    def replay(self) -> RouteDecision:
        """Decide again from the record: equal to ``decision``."""
        decide_ = route if self.rule is None else self.rule.decide
        return decide_(self.query, self.replicas, self.weights, Random(self.seed))

    @property
    def by(self) -> str:
        """The rule and its inputs besides the replicas, as text."""
        if self.rule is not None:
            return f"{self.rule.routing}, seed {self.seed}"
        weights = ", ".join(f"{field.name} {getattr(self.weights, field.name):g}" for field in fields(self.weights))
        return f"{OWN_RULE}, {weights}, seed {self.seed}"

    def ages_s(self) -> dict[str, float]:
        """Age of each replica's stats in seconds; replicas without stats are left out."""
        told = zip(self.replicas.replica_ids, self.replicas.age_s.tolist(), self.replicas.stats, strict=True)
        return {replica_id: age_s for replica_id, age_s, stats in told if stats is not None}


def decide(
    query: RouteQuery,
    candidates: Candidates,
    weights: RouteWeights,
    *,
    seed: int,
    time_s: float,
    rule: Rule | None = None,
) -> RouteRecord:
    """Decide by ``route``, or by ``rule`` in its place, with a fresh generator of ``seed``. Returns the record."""
    if rule is None:
        _, decision = choose(query, candidates, weights, seed)
    else:
        decision = rule.decide(query, candidates, weights, Random(seed))
    return RouteRecord(time_s, query, candidates, weights, seed, decision, rule)
