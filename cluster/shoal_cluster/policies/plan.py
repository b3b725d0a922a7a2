"""Looks over many requests: who may start what, and what has been given to whom so far.

A plan outlives its look. News of a replica are compared with what was decided, request by request: what they
cannot have changed stands, and the next look goes on after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from shoal_cluster.policies.given import Given, Price
from shoal_cluster.policies.ranking import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, load, work

Bools = NDArray[np.bool_]
TOKENS = 2  # of ``Candidates.columns``
NOBODY, NOTHING, NO_BLOCKS = np.zeros(0, np.bool_), np.zeros(0), np.zeros(0, np.int64)


class Plan:
    """What the cluster looks like to each request that comes after those that were given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: a replica may start a request when what it computes before it fills so many steps at most.
            That is what is due no later than the request, for replicas go by due dates, and all that was promised.

    Attributes:
        is_untouched: nothing was given away so far.
        given: to whom, in order, but for what was only ``set_aside``.
        is_mended: something that was taken back may be given again, and what is given in its place makes a difference.
    """

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        self._snapshot = snapshot
        self.weights = weights
        self._columns = snapshot.columns
        self._max_steps_ahead = max_steps_ahead
        self.is_untouched = True
        self.given: list[Given] = []
        self.is_mended = False
        self._differing: dict[int, list[int]] = {}  # columns there that ``stands`` has to look at
        self._open: Bools | None = None  # who may start something; made when asked, then kept
        self._startable: Bools = NOBODY  # the same after what was given
        self._num_open = self._num_startable = 0
        self._waits_s, self._token_s = NOTHING, 0.0
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
        does not count.
        """
        if not self._waits_s.size or token_s != self._token_s:
            told, columns = self._snapshot.told, self._snapshot.columns
            waits_s = columns[URGENT] * token_s
            waits_s += told["step_s"] * (told["num_running"] > 0)
            waits_s[~self._may_start(columns)] = np.inf
            self._waits_s, self._token_s = waits_s, token_s
        least_s = float(self._waits_s.min(initial=np.inf))
        return least_s if least_s < np.inf else 0.0

    def wait_at_most_s(self, token_s: float) -> float:
        """A bound on ``wait_s``, found sooner: what the replica with the least to do makes a prompt wait."""
        columns = self._snapshot.columns
        if not columns.size:
            return 0.0
        place = int(columns[URGENT].argmin())
        num_tokens = columns.item(URGENT, place)
        if columns.item(CAPACITY, place) < 0 or num_tokens > self._limit(place):
            return self.wait_s(token_s)
        return self._wait_at(place, token_s)

    def _wait_at(self, place: int, token_s: float) -> float:
        stats = self._snapshot.stats[place]
        step_s = stats.step_s if stats is not None and stats.num_running else 0.0
        return self._snapshot.columns.item(URGENT, place) * token_s + step_s

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
        prices = int(bool(self.given)), self.weights.prefill_price, self.weights.sequence_price(query)
        given = Given(query, place, matched, num_matched, due_s, num_blocks, num_tokens, *prices)
        given.wait_at(self._columns[:, place].tolist(), self._snapshot.replica_ids)
        self.given.append(given)
        self.set_aside(place, num_blocks, num_tokens)

    def give_again(self, given: Given) -> None:
        """What was taken back and ``stands``."""
        self.given.append(given)
        self._promise(given.place, 1, given.num_blocks, given.num_tokens)

    def keep(self, snapshot: Candidates, changed: Iterable[int], num_kept: int) -> list[Given]:
        """The cluster is ``snapshot`` now, by news of the replicas at ``changed`` alone. Of what was given, at most
        ``num_kept``, keeps the first that would each be given to the same replica again, to wait there. It may keep
        fewer. Returns the others, taken back.
        """
        self._snapshot = snapshot
        self._costs = NOTHING
        if self._waits_s.size:
            for place in changed:
                is_open = self._is_open(snapshot.columns, place)
                self._waits_s[place] = self._wait_at(place, self._token_s) if is_open else np.inf
        if self.is_untouched:
            self._columns, self._open = snapshot.columns, None
            return []
        num_kept = min(num_kept, len(self.given))
        for place in changed:
            num_kept = self._num_standing(place, num_kept)
        taken = self.take_back(num_kept)
        for place in changed:
            self._reset(place)
        return taken

    def take_back(self, num_kept: int) -> list[Given]:
        """Only the first so many were given. Returns the others."""
        taken = self.given[num_kept:]
        del self.given[num_kept:]
        for given in taken:
            self._promise(given.place, -1, -given.num_blocks, -given.num_tokens)
        if not self.given:
            self.is_untouched, self._columns = True, self._snapshot.columns
        return taken

    def differ(self, places: Iterable[int]) -> None:
        """Replicas there are not as they were to what was taken back: ``stands`` looks at them."""
        for place in places:
            self._differing[place] = self._columns[:, place].tolist()

    def mend(self, is_mended: bool) -> None:
        """Whether something that was taken back may be given again."""
        self.is_mended = is_mended
        if not is_mended:
            self._differing.clear()

    def stands(self, given: Given) -> bool:
        """Whether what was taken back would be given to the same replica again, to wait there."""
        price, ids = given.price, self._snapshot.replica_ids
        for place, column in self._differing.items():
            if place == given.place:
                price = given.price_at(place, column, ids)
                if not self._has_to_wait(given, place, price, column):
                    return False
            elif given.is_better_at(place, column, ids):
                return False
        given.price = price
        return True

    def know_matched(self, place: int, num_matched_blocks: int) -> None:
        """So many blocks of the first one's prompt are cached at ``place``."""
        first = self.given[0]
        if first.matched.item(place) != num_matched_blocks:
            first.matched = first.matched.copy()
            first.matched[place] = num_matched_blocks
            first.most_load = np.inf

    def _num_standing(self, place: int, count: int) -> int:
        """How many of the first ``count`` that were given are better off where they are than at ``place``, of which
        there are news, or have to wait there as before.
        """
        column, ids = self._snapshot.columns[:, place].tolist(), self._snapshot.replica_ids
        for number, given in enumerate(self.given[:count]):
            if given.place != place:
                if given.is_better_at(place, column, ids):
                    return number
                continue
            price = given.price_at(place, column, ids)
            if not self._has_to_wait(given, place, price, column):
                return number
            given.price = price
            column[TOKENS] += given.num_tokens
            column[LOAD] += given.num_tokens
            column[SEQUENCES] += 1
            column[OPEN_BLOCKS] -= given.num_blocks
            column[OPEN_SLOTS] -= 1
            column[ROOM] = column[OPEN_BLOCKS] if column[OPEN_SLOTS] > 0 else -1
        return count

    def _has_to_wait(self, given: Given, place: int, price: Price, column: Sequence[int]) -> bool:
        """Whether ``given`` costs no more where it is, at ``place``, with that column, and cannot start there yet."""
        if price > given.price or given.matched.item(place) != given.num_matched_blocks:
            return False
        return price[0] or not self._has_time(place, column[TOKENS], given.due_s)

    def _reset(self, place: int) -> None:
        """Make its column anew: the snapshot's, and what was given."""
        columns = self._columns
        if not self.is_untouched:
            columns[:, place] = self._snapshot.columns[:, place]
            for given in self.given:
                if given.place == place:
                    promise(columns, place, 1, given.num_blocks, given.num_tokens)
        if self._open is not None:
            is_open = self._is_open(self._snapshot.columns, place)
            self._num_open += is_open - self._open.item(place)
            self._open[place] = is_open
        self._note_changed(place)

    def _promise(self, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        if self.is_untouched:
            self.is_untouched, self._columns = False, self._columns.copy()  # it is the snapshot's
        promise(self._columns, place, num_requests, num_blocks, num_tokens)
        self._note_changed(place)

    def _note_changed(self, place: int) -> None:
        if place in self._differing:
            self.differ((place,))
        if self._open is not None:
            is_startable = self._is_open(self._columns, place)
            self._num_startable += is_startable - self._startable.item(place)
            self._startable[place] = is_startable

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """The same for a request of which only its size is known."""
        self._promise(place, 1, num_blocks, num_tokens)
        if self.is_mended:
            self.differ((place,))
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
