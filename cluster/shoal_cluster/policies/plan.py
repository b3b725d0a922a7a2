"""One look over many requests: who may start what, and what has been given to whom so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, ROOM, URGENT, Floats, Ints, due_column, promise
from shoal_cluster.policies.ranking import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, load, work

Bools = NDArray[np.bool_]
TOKENS = 2  # of ``Candidates.columns``


class Plan:
    """What the cluster looks like to each request that comes after those that were given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: a replica may start a request when what it computes before it fills so many steps at most.
            That is what is due no later than the request, for replicas go by due dates, and all that was promised.

    Attributes:
        is_untouched: nothing was given away so far.
    """

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        self._snapshot = snapshot
        self.weights = weights
        self._columns = snapshot.columns
        self._max_steps_ahead = max_steps_ahead
        self.is_untouched = True
        self._num_startable: int | None = None  # counted when asked, then kept
        self._wait_s: float | None = None
        self._costs: Floats = np.zeros((0, 0))  # of the queries considered now
        self._sequence_prices: Floats = np.zeros(0)
        self._blocks: Ints = np.zeros((0, 0), np.int64)

    @property
    def num_replicas(self) -> int:
        return len(self._snapshot)

    @property
    def num_startable(self) -> int:
        """How many replicas may start something yet, if it is urgent."""
        if self._num_startable is None:
            self._num_startable = int(np.count_nonzero(self._may_start(self._columns)))
        return self._num_startable

    def wait_s(self, token_s: float) -> float:
        """Until some replica can begin with a prompt that is sent now, if prompt tokens take ``token_s`` each: the step
        that runs has to end, and what was sent before comes first. 0 if none may start anything. What was given away
        does not count; found once.
        """
        if self._wait_s is None:
            told, columns = self._snapshot.told, self._snapshot.columns
            may_start = self._may_start(columns)
            waits_s = columns[URGENT] * token_s
            waits_s += told["step_s"] * (told["num_running"] > 0)
            self._wait_s = float(waits_s.min(where=may_start, initial=np.inf)) if may_start.any() else 0.0
        return self._wait_s

    def wait_at_most_s(self, token_s: float) -> float:
        """A bound on ``wait_s``, found sooner: what the replica with the least to do makes a prompt wait."""
        columns = self._snapshot.columns
        if not columns.size:
            return 0.0
        place = int(columns[URGENT].argmin())
        num_tokens = columns.item(URGENT, place)
        if columns.item(CAPACITY, place) < 0 or num_tokens > self._limit(place):
            return self.wait_s(token_s)
        told = self._snapshot.told
        return num_tokens * token_s + (told["step_s"].item(place) if told["num_running"].item(place) else 0.0)

    def consider(self, queries: Sequence[RouteQuery], matched: Ints) -> None:
        """Price ``queries`` [q] on every replica; ``matched`` are the blocks cached there [q, n]. They replace those
        before them.
        """
        size = np.array([[query.num_prompt_tokens, query.num_blocks_needed] for query in queries])
        uncached = np.maximum(size[:, :1] - matched * queries[0].block_size, 1)
        can_take = self._columns[CAPACITY] >= size[:, 1:]
        self._sequence_prices = np.array([self.weights.sequence_price(query) for query in queries])
        cluster = self._snapshot.matching(self._snapshot.num_matched_blocks, self._columns)
        is_like = not any(query.passed for query in queries)
        before = load(queries[0], cluster) if is_like else np.stack([load(query, cluster) for query in queries])
        costs = work(cluster, uncached, self._sequence_prices[:, np.newaxis], self.weights, before)
        self._costs = np.where(can_take, costs, np.inf)
        for number, query in enumerate(queries):
            if query.excluded:
                self._costs[number, np.isin(self._snapshot.replica_ids, list(query.excluded))] = np.inf
        self._blocks = np.maximum(size[:, 1:] - matched, 1)

    def best(self, number: int) -> tuple[int, bool]:
        """The replica for the query of that number, and whether it has room for it now. -1: none takes it."""
        costs = self._costs[number]
        with_room = np.where(self._columns[ROOM] >= self._blocks[number], costs, np.inf)
        place = int(with_room.argmin())
        if with_room[place] < np.inf:
            return place, True
        place = int(costs.argmin())
        return (place if costs[place] < np.inf else -1), False

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_in_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due in so many seconds."""
        column = self._columns[:, place].tolist()
        num_blocks = max(1, uncached_blocks(query, num_matched_blocks))
        if column[ROOM] < num_blocks or column[CAPACITY] < 0:
            return False
        ahead = self._snapshot.told[due_column(due_in_s)].item(place) + column[TOKENS]
        if query.passed:
            ahead = load(query, self._snapshot.matching(self._snapshot.num_matched_blocks, self._columns)).item(place)
        return bool(ahead <= self._limit(place))

    def give(self, query: RouteQuery, place: int, num_matched_blocks: int) -> None:
        """The replica at ``place`` is to take ``query``, now or later: what comes after counts on the rest."""
        self.set_aside(place, uncached_blocks(query, num_matched_blocks), uncached_tokens(query, num_matched_blocks))

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """The same for a request of which only its size is known."""
        if self.is_untouched:
            self.is_untouched, self._columns = False, self._columns.copy()  # it is the snapshot's
        if self._num_startable is not None:
            before = self._columns.item(URGENT, place)
            is_open = self._columns.item(CAPACITY, place) >= 0
            self._num_startable -= is_open and before <= self._limit(place) < before + num_tokens
        promise(self._columns, place, 1, num_blocks, num_tokens)
        if self._costs.size:
            self._costs[:, place] += num_tokens
            self._costs[:, place] += self._sequence_prices

    def seen_by_next(self, candidates: Candidates) -> Candidates:
        """``candidates`` of the same moment, with what was given counted as promised."""
        if self.is_untouched:
            return candidates
        return candidates.matching(candidates.num_matched_blocks, self._columns.copy())

    def _may_start(self, columns: Ints) -> Bools:
        limits = self._max_steps_ahead * self._snapshot.told["max_num_batched_tokens"]
        may_start: Bools = columns[URGENT] <= limits
        may_start &= columns[CAPACITY] >= 0
        return may_start

    def _limit(self, place: int) -> float:
        """Tokens that a replica may have before it and still start something."""
        return self._max_steps_ahead * float(self._snapshot.told["max_num_batched_tokens"].item(place))
