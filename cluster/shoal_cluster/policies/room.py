"""Room for a request on each replica: whether there is enough now, how much is missing, and when to wait for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, Floats, Ints
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.route_query import RouteQuery


def new_blocks(query: RouteQuery, num_matched_blocks: Ints) -> Ints:
    """Blocks that the request takes on each replica: at least the one of its first token [n]."""
    return np.maximum(query.num_blocks_needed - num_matched_blocks, 1)


def must_wait(query: RouteQuery, candidates: Candidates) -> NDArray[np.bool_]:
    """Which replicas have no room for the request now [n]."""
    waits: NDArray[np.bool_] = candidates.columns[ROOM] < new_blocks(query, candidates.num_matched_blocks)
    return waits


def has_room(query: RouteQuery, candidates: Candidates, place: int) -> bool:
    """Whether the replica at ``place`` accepts requests of this size and has room for this one now."""
    columns, num_new_blocks = candidates.columns, query.num_blocks_needed - candidates.num_matched_blocks.item(place)
    takes_it = columns.item(CAPACITY, place) >= query.num_blocks_needed
    return takes_it and columns.item(ROOM, place) >= max(1, num_new_blocks)


def missing_tokens(num_new_blocks: Ints, room: Ints, block_size: int) -> Ints:
    """Tokens of the blocks that others must free before so many new ones find room [n]."""
    missing: Ints = np.maximum(num_new_blocks - np.maximum(room, 0), 0) * block_size
    return missing


def worth_waiting_for(
    query: RouteQuery, candidates: Candidates, costs: Floats, waits: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Of the replicas where the request ``waits`` for room, those that are better than any that has room now [n]: they
    cost less and have more of the prompt cached than the cheapest of these. None if the objective is lost, lest it
    waits for long; nor if a replica with room has nothing to compute, as its time would be lost.
    """
    roomy = is_eligible(query, candidates) & ~waits
    if query.is_late or not roomy.any() or (roomy & (candidates.columns[LOAD] == 0)).any():
        return np.zeros(len(candidates), np.bool_)
    cheapest = np.where(roomy, costs, np.inf).argmin()
    matched = candidates.num_matched_blocks
    better: NDArray[np.bool_] = waits & (matched > matched[cheapest]) & (costs < costs[cheapest])
    return better
