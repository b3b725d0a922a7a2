"""Placement rules that know less, to compare with: the same filter and pick, a poorer score."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

from shoal_cluster.policies.routing import RouteDecision, RouteQuery, RouteWeights, Score, rank, route
from shoal_cluster.policies.view import ReplicaView

Routing = Literal["predicted_ttft", "round_robin", "least_requests", "most_free_blocks"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


def place(
    routing: Routing,
    query: RouteQuery,
    replicas: Sequence[ReplicaView],
    weights: RouteWeights,
    rng: Random,
    turn: int,
) -> RouteDecision:
    """Decide by the rule of that name. ``turn`` counts the decisions before this one; only round robin uses it."""
    match routing:
        case "predicted_ttft":
            return route(query, replicas, weights, rng)
        case "round_robin":
            return round_robin(query, replicas, rng, turn)
        case "least_requests":
            return least_requests(query, replicas, rng)
        case "most_free_blocks":
            return most_free_blocks(query, replicas, rng)


def round_robin(query: RouteQuery, replicas: Sequence[ReplicaView], rng: Random, turn: int) -> RouteDecision:
    """Each replica in turn, in the order of their ids."""
    position = {replica_id: i for i, replica_id in enumerate(sorted(r.replica_id for r in replicas))}
    return rank(query, replicas, rng, lambda row, _: Score((position[row.replica_id] - turn) % len(position)))


def least_requests(query: RouteQuery, replicas: Sequence[ReplicaView], rng: Random) -> RouteDecision:
    """Fewest requests running, waiting or on their way."""
    return rank(
        query, replicas, rng, lambda row, stats: Score(stats.num_running + stats.num_waiting + row.num_reserved)
    )


def most_free_blocks(query: RouteQuery, replicas: Sequence[ReplicaView], rng: Random) -> RouteDecision:
    """Most blocks free and not promised."""
    return rank(query, replicas, rng, lambda row, stats: Score(row.num_reserved_blocks - stats.num_free_blocks))
