"""One look over many requests: who may start what, and what has been given to whom so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import DUE, Candidates, Floats, Ints
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
        self.weights = weights
        self._takes: Bools = told["connected"] & told["known"] & ~told["draining"]
        self._promised: Ints = snapshot.promised.copy()
        self._limits: Floats = max_steps_ahead * told["max_num_batched_tokens"]
        self._ahead: Ints = told[DUE[0]] + self._promised[2]
        self.may_start: Bools = self._takes & (self._ahead <= self._limits)
        self._costs: Floats = np.zeros((0, 0))
        self._sequence_prices: Floats = np.zeros(0)
        self._blocks: Ints = np.zeros((0, 0), np.int64)
        self._free_blocks: Ints = told["num_open_blocks"] - self._promised[1]
        self._has_slot: Bools = told["num_open_slots"] > self._promised[0]

    def wait_s(self, token_s: float) -> float:
        """Until some replica can begin with a prompt that is sent now, if prompt tokens take ``token_s`` each: the step
        that runs has to end, and what was sent before comes first. 0 if none may start anything.
        """
        told = self._snapshot.told
        waits_s = self._ahead * token_s + np.where(told["num_running"] > 0, told["step_s"], 0.0)
        return float(waits_s[self.may_start].min()) if self.may_start.any() else 0.0

    def consider(self, queries: Sequence[RouteQuery], matched: Ints) -> None:
        """Price ``queries`` [q] on every replica; ``matched`` are the blocks cached there [q, n]."""
        size = np.array([[query.num_prompt_tokens, query.num_blocks_needed] for query in queries])
        uncached = np.maximum(1, size[:, :1] - matched * queries[0].block_size)
        can_take = self._takes & (size[:, 1:] <= self._snapshot.told["num_total_blocks"])
        self._sequence_prices = np.array([self.weights.sequence_price(query) for query in queries])
        costs = work(self._snapshot, uncached, self._sequence_prices[:, np.newaxis], self.weights)
        self._costs = np.where(can_take, costs, np.inf)
        for number, query in enumerate(queries):
            if query.excluded:
                self._costs[number, np.isin(self._snapshot.replica_ids, list(query.excluded))] = np.inf
        self._blocks = np.maximum(1, size[:, 1:] - matched)

    def best(self, number: int) -> tuple[int, bool]:
        """The replica for the query of that number, and whether it has room for it now. -1: none takes it."""
        costs = self._costs[number]
        has_room = self._has_slot & (self._free_blocks >= self._blocks[number])
        with_room = np.where(has_room, costs, np.inf)
        place = int(with_room.argmin())
        if with_room[place] < np.inf:
            return place, True
        place = int(costs.argmin())
        return (place if costs[place] < np.inf else -1), False

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_in_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due in so many seconds."""
        ahead = self._snapshot.told[DUE[bisect_left(DUE_WITHIN_S, due_in_s)]][place] + self._promised[2, place]
        num_blocks = max(1, uncached_blocks(query, num_matched_blocks))
        has_room = self._has_slot[place] and self._free_blocks[place] >= num_blocks
        return bool(self._takes[place] and ahead <= self._limits[place] and has_room)

    def give(self, query: RouteQuery, place: int, num_matched_blocks: int) -> None:
        """The replica at ``place`` is to take ``query``, now or later: what comes after counts on the rest."""
        self.set_aside(place, uncached_blocks(query, num_matched_blocks), uncached_tokens(query, num_matched_blocks))

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """The same for a request of which only its size is known."""
        self._promised[:, place] += (1, num_blocks, num_tokens)
        self._costs[:, place] += num_tokens
        self._costs[:, place] += self._sequence_prices
        told = self._snapshot.told[place]
        self._free_blocks[place] -= num_blocks
        self._has_slot[place] = told["num_open_slots"] > self._promised[0, place]
        self.may_start[place] &= told[DUE[0]] + self._promised[2, place] <= self._limits[place]

    def promised(self) -> Ints:
        """What the snapshot had promised, and what was given."""
        return self._promised.copy()
