"""Where other gateways' requests will go."""

from __future__ import annotations

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM
from shoal_cluster.policies.room import missing_tokens
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
    uncached, blocks = np.full(len(cluster), num_tokens), np.full(len(cluster), num_blocks)
    uncached[place], blocks[place] = wish.num_tokens, wish.num_blocks
    costs = work(cluster, uncached, 0.0, weights.sequence_price(wish.decode_steps), weights, columns[LOAD])
    costs += missing_tokens(blocks, columns[ROOM], block_size) * np.float64(weights.prefill_price)
    costs[columns[CAPACITY] < num_blocks] = np.inf
    has_room = (columns[ROOM] >= blocks) & (costs < np.inf)
    best = int(np.where(has_room if has_room.any() else True, costs, np.inf).argmin())
    is_idle = (has_room & (columns[LOAD] == 0)).any()
    leaves = has_room.any() and not has_room[place] and (is_idle or not wish.num_cached_blocks)
    if leaves or costs[best] < costs[place]:
        return best, num_blocks, num_tokens
    return place, wish.num_blocks, wish.num_tokens
