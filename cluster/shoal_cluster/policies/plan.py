"""One look over many requests: who may start what, and what has been given to whom so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates, Floats, Ints
from shoal_cluster.policies.ranking import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, work
from shoal_replica.stats import DUE_WITHIN_S

Bools = NDArray[np.bool_]


class Plan:
    """Costs of all considered requests at once; what is given away raises the costs of those that come after.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: a replica may start a request when what it computes before it fills so many steps at most.
            That is what is due no later than the request, for replicas go by due dates, and all that was promised.

    Attributes:
        may_start: replicas that may start something yet, if it is urgent [n].
    """

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        told = snapshot.told
        self._snapshot = snapshot
        self._weights = weights
        self._takes: Bools = told["connected"] & told["known"] & ~told["draining"]
        self._promised: Ints = snapshot.promised.copy()
        self._limits: Floats = max_steps_ahead * told["max_num_batched_tokens"]
        self._due = [
            (stats.due_tokens if stats else ()) or (num_tokens,) * len(DUE_WITHIN_S)
            for stats, num_tokens in zip(snapshot.stats, told["num_waiting_tokens"].tolist(), strict=True)
        ]
        soonest = np.array([due[0] for due in self._due])
        self.may_start: Bools = self._takes & (soonest + self._promised[2] <= self._limits)
        self._costs: Floats = np.zeros((0, 0))
        self._blocks: Ints = np.zeros((0, 0), np.int64)

    def consider(self, queries: Sequence[RouteQuery], matched: Ints) -> None:
        """Price ``queries`` [q] on every replica; ``matched`` are the blocks cached there [q, n]."""
        size = np.array([[query.num_prompt_tokens, query.num_blocks_needed] for query in queries])
        uncached = np.maximum(1, size[:, :1] - matched * queries[0].block_size)
        self._costs = work(self._snapshot, uncached, self._weights)
        self._costs[:, ~self._takes] = np.inf
        self._costs[size[:, 1:] > self._snapshot.told["num_total_blocks"]] = np.inf
        for number, query in enumerate(queries):
            if query.excluded:
                self._costs[number, np.isin(self._snapshot.replica_ids, list(query.excluded))] = np.inf
        self._blocks = np.maximum(0, size[:, 1:] - matched)

    def best(self, number: int) -> tuple[int, bool]:
        """The replica for the query of that number, and whether it has room for it now. -1: none takes it."""
        given = self._promised - self._snapshot.promised
        costs = self._costs[number] + given[2] + self._weights.decode_price * given[0]
        with_room = np.where(self._has_room(self._blocks[number]), costs, np.inf)
        place = int(with_room.argmin())
        if np.isfinite(with_room[place]):
            return place, True
        place = int(costs.argmin())
        return (place if np.isfinite(costs[place]) else -1), False

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_in_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due in so many seconds."""
        ahead = self._due[place][bisect_left(DUE_WITHIN_S, due_in_s)] + self._promised[2, place]
        if not (self._takes[place] and ahead <= self._limits[place]):
            return False
        return bool(self._has_room(uncached_blocks(query, num_matched_blocks))[place])

    def give(self, query: RouteQuery, place: int, num_matched_blocks: int) -> None:
        """The replica at ``place`` is to take ``query``, now or later: what comes after counts on the rest."""
        self.set_aside(place, uncached_blocks(query, num_matched_blocks), uncached_tokens(query, num_matched_blocks))

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """The same for a request of which only its size is known."""
        self._promised[:, place] += (1, num_blocks, num_tokens)
        self.may_start[place] &= self._due[place][0] + self._promised[2, place] <= self._limits[place]

    def promised(self) -> Ints:
        """What the snapshot had promised, and what was given."""
        return self._promised.copy()

    def _has_room(self, num_blocks: Ints | int) -> Bools:
        told = self._snapshot.told
        has: Bools = told["num_open_blocks"] - self._promised[1] >= np.maximum(1, num_blocks)
        has &= told["num_open_slots"] > self._promised[0]
        return has
