"""Looks over many requests: who may start what, and what has been given to whom so far.

A plan outlives its look. News of a replica are compared with what was decided, request by request: what they
cannot have changed stands, and the next look goes on after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import (
    CAPACITY,
    LOAD,
    OPEN_BLOCKS,
    OPEN_SLOTS,
    ROOM,
    SEQUENCES,
    URGENT,
    Floats,
    Ints,
    due_column,
    promise,
)
from shoal_cluster.policies.ranking import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, load, work

Bools = NDArray[np.bool_]
TOKENS = 2  # of ``Candidates.columns``
NOBODY, NOTHING, NO_BLOCKS = np.zeros(0, np.bool_), np.zeros(0), np.zeros(0, np.int64)


@dataclass(slots=True)
class Given:
    """A request that is to wait for a replica, and by what.

    Attributes:
        matched: blocks cached on each replica [n]; ``num_matched_blocks`` where it is to wait.
        num_blocks, num_tokens: what it takes there.
        least_blocks: that a replica must have free to count as one with room for it.
        price: whether there is no room for it there, and the cost. The least of all replicas.
    """

    query: RouteQuery
    place: int
    matched: Ints
    num_matched_blocks: int
    due_s: float
    num_blocks: int
    num_tokens: int
    least_blocks: int
    sequence_price: float
    price: tuple[bool, float] = (True, 0.0)


class Plan:
    """What the cluster looks like to each request that comes after those that were given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: a replica may start a request when what it computes before it fills so many steps at most.
            That is what is due no later than the request, for replicas go by due dates, and all that was promised.

    Attributes:
        is_untouched: nothing was given away so far.
        given: to whom, in order, but for what was only ``set_aside``.
    """

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        self._snapshot = snapshot
        self.weights = weights
        self._columns = snapshot.columns
        self._max_steps_ahead = max_steps_ahead
        self.is_untouched = True
        self.given: list[Given] = []
        self._is_given: Bools = NOBODY  # who was given some of them
        self._slack: Floats = NOTHING  # with a greater load, it is the best for none of them
        self._open: Bools | None = None  # who may start something; made when asked, then kept
        self._startable: Bools = NOBODY  # the same after what was given
        self._num_open = self._num_startable = 0
        self._wait_s: float | None = None
        self._costs: Floats = NOTHING  # of the queries considered now
        self._sequence_prices: Floats = NOTHING
        self._blocks: Ints = NO_BLOCKS

    @property
    def num_replicas(self) -> int:
        return len(self._snapshot)

    @property
    def num_startable(self) -> int:
        """How many replicas may start something yet, if it is urgent."""
        self._count_open()
        return self._num_startable

    @property
    def num_open(self) -> int:
        """The same before anything was given away."""
        self._count_open()
        return self._num_open

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
        stats = self._snapshot.stats[place]
        return num_tokens * token_s + (stats.step_s if stats is not None and stats.num_running else 0.0)

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

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due then."""
        columns, num_blocks = self._columns, max(1, uncached_blocks(query, num_matched_blocks))
        if columns.item(ROOM, place) < num_blocks or columns.item(CAPACITY, place) < 0:
            return False
        if query.passed:
            ahead = load(query, self._snapshot.matching(self._snapshot.num_matched_blocks, self._columns)).item(place)
            return bool(ahead <= self._limit(place))
        return self._has_time(place, columns.item(TOKENS, place), due_s)

    def _has_time(self, place: int, num_promised_tokens: int, due_s: float) -> bool:
        ahead: int = self._snapshot.told[due_column(due_s - self._snapshot.now)].item(place)
        return ahead + num_promised_tokens <= self._limit(place)

    def give(self, query: RouteQuery, place: int, matched: Ints, due_s: float) -> None:
        """The replica at ``place`` is to take ``query``, now or later: what comes after counts on the rest."""
        num_matched = matched.item(place)
        num_blocks, num_tokens = uncached_blocks(query, num_matched), uncached_tokens(query, num_matched)
        least_blocks, sequence_price = int(bool(self.given)), self.weights.sequence_price(query)
        given = Given(query, place, matched, num_matched, due_s, num_blocks, num_tokens, least_blocks, sequence_price)
        given.price = self._price(given, place, self._columns[:, place].tolist())
        if not self._is_given.size:
            self._is_given = np.zeros(len(self._snapshot), np.bool_)
            self._slack = np.full(len(self._snapshot), -np.inf)
        self.given.append(given)
        self._is_given[place] = True
        has_no_room, cost = given.price
        if has_no_room:
            self._slack[:] = np.inf
        else:
            uncached = np.maximum(query.num_prompt_tokens - matched * query.block_size, 1)
            np.maximum(self._slack, cost - self.weights.prefill_price * uncached, out=self._slack)
            self._slack[place] = np.inf
        self.set_aside(place, num_blocks, num_tokens)

    def keep(self, snapshot: Candidates, changed: Iterable[int], num_kept: int) -> None:
        """The cluster is ``snapshot`` now, by news of the replicas at ``changed`` alone. Of what was given, at most
        ``num_kept``, keeps the first that would each be given to the same replica again, to wait there. It may keep
        fewer.
        """
        self._snapshot, self._wait_s = snapshot, None
        self._costs = NOTHING
        if self.is_untouched:
            self._columns, self._open = snapshot.columns, None
            return
        num_kept = min(num_kept, len(self.given))
        for place in changed:
            num_kept = self._num_standing(place, num_kept)
        self.take_back(num_kept)
        for place in changed:
            self._reset(place)

    def take_back(self, num_kept: int) -> None:
        """Only the first so many were given."""
        taken = self.given[num_kept:]
        del self.given[num_kept:]
        for place in {given.place for given in taken}:
            self._reset(place)
        if not self.given:
            self.is_untouched, self._columns = True, self._snapshot.columns

    def know_matched(self, place: int, num_matched_blocks: int) -> None:
        """So many blocks of the first one's prompt are cached at ``place``."""
        first = self.given[0]
        if first.matched.item(place) != num_matched_blocks:
            first.matched = first.matched.copy()
            first.matched[place] = num_matched_blocks
            self._slack[place] = np.inf

    def _num_standing(self, place: int, count: int) -> int:
        """How many of the first ``count`` that were given are better off where they are than at ``place``, of which
        there are news, or have to wait there as before.
        """
        column = self._snapshot.columns[:, place].tolist()
        if column[LOAD] > self._slack.item(place):
            return count
        for number, given in enumerate(self.given[:count]):
            price = self._price(given, place, column)
            if given.place != place:
                if price <= given.price:
                    return number
                continue
            if price > given.price or given.matched.item(place) != given.num_matched_blocks:
                return number
            if not price[0] and self._has_time(place, column[TOKENS], given.due_s):
                return number
            given.price = price
            column[TOKENS] += given.num_tokens
            column[LOAD] += given.num_tokens
            column[SEQUENCES] += 1
            column[OPEN_BLOCKS] -= given.num_blocks
            column[OPEN_SLOTS] -= 1
            column[ROOM] = column[OPEN_BLOCKS] if column[OPEN_SLOTS] > 0 else -1
        return count

    def _price(self, given: Given, place: int, column: Sequence[int]) -> tuple[bool, float]:
        """As ``Given.price``, at ``place`` with that column; infinite for one that cannot take it."""
        query, num_matched = given.query, given.matched.item(place)
        if column[CAPACITY] < query.num_blocks_needed or (
            query.excluded and self._snapshot.replica_ids[place] in query.excluded
        ):
            return True, np.inf
        uncached = max(1, query.num_prompt_tokens - num_matched * query.block_size)
        cost = uncached * self.weights.prefill_price + column[LOAD] + given.sequence_price * column[SEQUENCES]
        return column[ROOM] < max(given.least_blocks, query.num_blocks_needed - num_matched), cost

    def _reset(self, place: int) -> None:
        """Make its column anew: the snapshot's, and what was given."""
        columns = self._columns
        if not self.is_untouched:
            columns[:, place] = self._snapshot.columns[:, place]
        if self._is_given[place]:
            for given in self.given:
                if given.place == place:
                    promise(columns, place, 1, given.num_blocks, given.num_tokens)
        if self._open is not None:
            is_open, is_startable = self._is_open(self._snapshot.columns, place), self._is_open(columns, place)
            self._num_open += is_open - self._open.item(place)
            self._num_startable += is_startable - self._startable.item(place)
            self._open[place], self._startable[place] = is_open, is_startable

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """The same for a request of which only its size is known."""
        if self.is_untouched:
            self.is_untouched, self._columns = False, self._columns.copy()  # it is the snapshot's
        promise(self._columns, place, 1, num_blocks, num_tokens)
        if self._open is not None and self._startable[place] and not self._is_open(self._columns, place):
            self._startable[place] = False
            self._num_startable -= 1
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

    def _is_open(self, columns: Ints, place: int) -> bool:
        return columns.item(URGENT, place) <= self._limit(place) and columns.item(CAPACITY, place) >= 0

    def _count_open(self) -> None:
        if self._open is None:
            self._open = self._may_start(self._snapshot.columns)
            self._startable = self._open.copy() if self.is_untouched else self._may_start(self._columns)
            self._num_open, self._num_startable = map(int, map(np.count_nonzero, (self._open, self._startable)))

    def _limit(self, place: int) -> float:
        """Tokens that a replica may have before it and still start something."""
        stats = self._snapshot.stats[place]
        return self._max_steps_ahead * (1 if stats is None else stats.max_num_batched_tokens)
