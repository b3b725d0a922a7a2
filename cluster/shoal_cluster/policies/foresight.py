"""Where other gateways' requests will go."""

from __future__ import annotations

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM
from shoal_cluster.policies.routing import RouteWeights, work
from shoal_cluster.policies.wishes import PlacedWish


def foresee(other: PlacedWish, cluster: Candidates, weights: RouteWeights, block_size: int) -> tuple[int, int, int]:
    """Where the request behind a wish goes by what is known now, as ``route`` would place it: its gateway may not have
    heard yet what has changed since. A wish tells only what is cached at its own replica, so the prompt counts as
    cached nowhere else; and no replica counts as excluded.

    Returns: the place in ``cluster``, and the blocks and the tokens that it takes there.
    """
    wish, place, columns = other.wish, other.place, cluster.columns
    num_blocks = wish.num_blocks + wish.num_cached_blocks
    num_tokens = wish.num_tokens + wish.num_cached_blocks * block_size
    uncached = np.full(len(cluster), num_tokens)
    uncached[place] = wish.num_tokens
    costs = work(cluster, uncached, 0.0, weights.sequence_price(wish.decode_steps), weights, columns[LOAD])
    takes_such = columns[CAPACITY] >= num_blocks
    has_room = takes_such & (columns[ROOM] >= num_blocks)
    has_room[place] = takes_such[place] and columns[ROOM, place] >= wish.num_blocks
    costs = np.where(has_room if has_room.any() else takes_such, costs, np.inf)
    best = int(costs.argmin())
    if costs[best] < costs[place]:
        return best, num_blocks, num_tokens
    return place, wish.num_blocks, wish.num_tokens
