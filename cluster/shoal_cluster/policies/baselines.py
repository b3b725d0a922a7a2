"""Placement rules that know less, to compare with: the same filter and pick, a poorer score."""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.ranking import RouteDecision, RouteQuery, Scores, rank
from shoal_cluster.policies.routing import RouteWeights, route

Routing = Literal["predicted_ttft", "round_robin", "least_requests", "most_free_blocks"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


def place(
    routing: Routing,
    query: RouteQuery,
    candidates: Candidates,
    weights: RouteWeights,
    rng: Random,
    turn: int,
) -> RouteDecision:
    """Decide by the rule of that name. ``turn`` counts the decisions before this one; only round robin uses it."""
    match routing:
        case "predicted_ttft":
            return route(query, candidates, weights, rng)
        case "round_robin":
            return rank(query, candidates, rng, lambda _, c: Scores((np.arange(len(c)) - turn) % len(c)))
        case "least_requests":
            return rank(query, candidates, rng, least_requests)
        case "most_free_blocks":
            return rank(query, candidates, rng, most_free_blocks)


def least_requests(query: RouteQuery, candidates: Candidates) -> Scores:
    """Fewest requests running, waiting or on their way."""
    return Scores(candidates.told["num_running"] + candidates.told["num_waiting"] + candidates.num_reserved)


def most_free_blocks(query: RouteQuery, candidates: Candidates) -> Scores:
    """Most blocks free and not promised."""
    return Scores(candidates.num_reserved_blocks - candidates.told["num_free_blocks"])
