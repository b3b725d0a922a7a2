"""The plan behind a look over many requests: which may start where, and what has been given to which replica so far.

A plan outlives its look. News of a replica is compared with what was decided, request by request: decisions that it
cannot have changed stand, and the next look goes on after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import (
    CAPACITY,
    LOAD,
    OPEN_BLOCKS,
    OPEN_SLOTS,
    PER_CENT,
    ROOM,
    SEQUENCES,
    SLOWER,
    URGENT,
    Floats,
    Ints,
    due_column,
)
from shoal_cluster.policies.foresight import foresee
from shoal_cluster.policies.given import Given, Price
from shoal_cluster.policies.promised import Promised
from shoal_cluster.policies.ranking import RouteQuery, is_eligible, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, cost, load, work
from shoal_cluster.policies.steps_ahead import StepsAhead
from shoal_cluster.policies.wishes import PlacedWish

Bools = NDArray[np.bool_]
TOKENS = 2  # the row of promised tokens in ``Candidates.columns``
NOBODY, NOTHING, NO_BLOCKS = np.zeros(0, np.bool_), np.zeros(0), np.zeros(0, np.int64)


class Plan:
    """The cluster as each request sees it after room for those before it was given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: how much work replicas may have before a request that is sent there; see ``StepsAhead``.

    Attributes:
        given: the requests given to replicas, in order, without those for which room was only ``set_aside``.
        is_mended: something that was taken back may be given again, so what is given in its place makes a difference.
    """

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        self.weights = weights
        self._steps_ahead = StepsAhead(max_steps_ahead)
        self._promised = Promised(snapshot, self._steps_ahead)
        self.given: list[Given] = []
        self.is_mended = False
        self._differing: dict[int, list[int]] = {}  # by place: columns that ``stands`` has to look at
        self._waits_s, self._token_s = NOTHING, 0.0
        self._soonest = -1  # the replica that ``wait_at_most_s`` goes by; -1: none in particular
        self._unread: set[int] = set()  # places of news that moved nothing
        self._taken: frozenset[int] = frozenset()  # places of what is ``given``
        self._tempted: list[Given] = []  # of what is given, what another replica might be better for
        self._taken_back: tuple[list[Given], list[int], Ints] = [], [], NO_BLOCKS  # last, and the columns before
        self._costs: Floats = NOTHING  # of the queries considered now
        self._sequence_prices: Floats = NOTHING
        self._blocks: Ints = NO_BLOCKS
        self._snapshot = snapshot

    @property
    def num_replicas(self) -> int:
        return len(self._snapshot)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been given away so far."""
        return self._promised.is_untouched

    @property
    def num_startable(self) -> int:
        """How many replicas may still start something, if it is urgent."""
        return self._promised.num_startable

    @property
    def has_startable(self) -> bool:
        """Whether any may still start something."""
        return self._promised.has_startable

    @property
    def num_open(self) -> int:
        """How many may start something by the snapshot alone, before anything is given away."""
        return self._promised.num_open

    def wait_s(self, token_s: float) -> float:
        """Seconds until some replica can begin with a prompt that is sent now, at ``token_s`` per prompt token: the
        running step has to end, and what was sent before comes first. 0 if none may start anything. What was given
        away in this plan does not count.
        """
        if not self._waits_s.size or token_s != self._token_s:
            told, columns = self._snapshot.told, self._snapshot.columns
            waits_s = columns[URGENT] * token_s
            waits_s += told["step_s"] * (told["num_running"] > 0)
            waits_s[~self._promised.may_start()] = np.inf
            self._waits_s, self._token_s = waits_s, token_s
        least_s = float(self._waits_s.min(initial=np.inf))
        return least_s if least_s < np.inf else 0.0

    def wait_at_most_s(self, token_s: float) -> float:
        """An upper bound on ``wait_s`` that is found sooner: the wait at the replica with the least to do."""
        columns = self._snapshot.columns
        if not columns.size:
            return 0.0
        place = int(columns[URGENT].argmin())
        if not self._promised.is_open(place):
            self._soonest = -1
            return self.wait_s(token_s)
        self._soonest = place
        return self._wait_at(place, token_s)

    def _wait_at(self, place: int, token_s: float) -> float:
        stats = self._snapshot.stats[place]
        step_s = stats.step_s if stats is not None and stats.num_running else 0.0
        return self._snapshot.columns.item(URGENT, place) * token_s + step_s

    def consider(self, queries: Sequence[RouteQuery], matched: Ints) -> None:
        """Price ``queries`` [q] on every replica, with the blocks ``matched`` there [q, n]. They replace the queries
        that were considered before.
        """
        cluster = self._snapshot.matching(matched[0], self._promised.columns)
        self._sequence_prices = np.array([self.weights.sequence_price(query) for query in queries])
        if len(queries) == 1:
            (query,) = queries
            self._costs = np.where(is_eligible(query, cluster), cost(query, cluster, self.weights), np.inf)[np.newaxis]
            self._blocks = np.maximum(query.num_blocks_needed - matched, 1)
            return
        size = np.array([[query.num_prompt_tokens, query.num_blocks_needed] for query in queries])
        uncached = np.maximum(size[:, :1] - matched * queries[0].block_size, 1)
        is_like = not any(query.passed for query in queries)
        before = load(queries[0], cluster) if is_like else np.stack([load(query, cluster) for query in queries])
        costs = work(cluster, uncached, self._sequence_prices[:, np.newaxis], self.weights, before)
        self._costs = np.where(np.stack([is_eligible(query, cluster) for query in queries]), costs, np.inf)
        self._blocks = np.maximum(size[:, 1:] - matched, 1)

    def best(self, number: int) -> tuple[int, bool]:
        """The place of the replica for query ``number``, and whether it has room for it now. -1: none takes it."""
        costs = self._costs[number]
        with_room = np.where(self._promised.columns[ROOM] >= self._blocks[number], costs, np.inf)
        place = int(with_room.argmin())
        if with_room[place] < np.inf:
            return place, True
        place = int(costs.argmin())
        return (place if costs[place] < np.inf else -1), False

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due at ``due_s``."""
        columns, num_blocks = self._promised.columns, max(1, uncached_blocks(query, num_matched_blocks))
        if columns.item(ROOM, place) < num_blocks or columns.item(CAPACITY, place) < 0:
            return False
        if query.passed:
            ahead = load(query, self._snapshot.matching(self._snapshot.num_matched_blocks, columns)).item(place)
        else:
            ahead = self._told_ahead(place, due_s) + columns.item(TOKENS, place)
        num_tokens = uncached_tokens(query, num_matched_blocks)
        return self._steps_ahead.may_start(num_tokens, ahead, self._snapshot, place)

    def _told_ahead(self, place: int, due_s: float) -> int:
        ahead: int = self._snapshot.told[due_column(due_s - self._snapshot.now)].item(place)
        return ahead

    def give(self, query: RouteQuery, place: int, matched: Ints, due_s: float) -> None:
        """The replica at ``place`` is to take ``query``, now or later: requests after it count on what is left."""
        num_matched = matched.item(place)
        num_blocks, num_tokens = uncached_blocks(query, num_matched), uncached_tokens(query, num_matched)
        prices = int(bool(self.given)), self.weights.prefill_price, self.weights.sequence_price(query)
        given = Given(query, place, matched, num_matched, due_s, num_blocks, num_tokens, *prices)
        given.wait_at(self._promised.columns[:, place].tolist(), self._snapshot.replica_ids)
        self.given.append(given)
        self.set_aside(place, num_blocks, num_tokens)

    def give_again(self, given: Given) -> None:
        """Give a request that was taken back and ``stands``."""
        self.given.append(given)
        self._promised.add_later(given)
        if given.place in self._differing:
            self.differ((given.place,))

    def keep(self, snapshot: Candidates, changed: Iterable[int], num_kept: int) -> list[Given]:
        """The cluster is ``snapshot`` now, by news of the replicas at ``changed`` alone. Of what was given, keep the
        first requests, at most ``num_kept``, that would each be given to the same replica again, to wait there; it may
        keep fewer than it could. Returns the others, taken back.
        """
        self._snapshot = snapshot
        self._promised.renew(snapshot)
        self._costs = NOTHING
        unread = self._unread.union(changed)
        self._unread.clear()
        if self._waits_s.size:
            for place in unread:
                is_open = self._promised.is_open(place)
                self._waits_s[place] = self._wait_at(place, self._token_s) if is_open else np.inf
        if self.is_untouched:
            return []
        num_kept = min(num_kept, len(self.given))
        for place in changed:
            num_kept = self._num_standing(place, num_kept)
        taken = self.given[num_kept:]
        del self.given[num_kept:]
        self._reset(unread.union([given.place for given in taken]))
        return taken

    def settle(self) -> None:
        """All considered requests have been given: ``stays_by`` may be asked until the next snapshot."""
        self._taken = frozenset([given.place for given in self.given])
        self._tempted = [given for given in self.given if given.most_load >= 0]

    def stays_by(self, place: int, column: Sequence[int]) -> bool:
        """Whether news of the replica at ``place``, with that ``column`` now, certainly leaves everything given where
        it is, waiting elsewhere. If so, the column is read with the next snapshot.
        """
        if place in self._taken or place == self._soonest or self._soonest < 0:
            return False
        ids = self._snapshot.replica_ids
        for given in self._tempted:
            if given.is_better_at(place, column, ids):
                return False
        self._unread.add(place)
        return True

    def take_back(self, num_kept: int) -> list[Given]:
        """Keep only the first ``num_kept`` that were given. Returns the others."""
        taken = self.given[num_kept:]
        if not taken:
            return []
        places = {given.place for given in taken}
        self._taken_back = taken, list(places), self._promised.columns_at(places)
        del self.given[num_kept:]
        self._reset(places)
        return taken

    def undo_take_back(self) -> None:
        """Give again what was taken back last; nothing may have been given since."""
        (taken, places, columns), self._taken_back = self._taken_back, ([], [], NO_BLOCKS)
        self.given += taken
        self._costs = NOTHING
        self._promised.restore(places, columns)
        self.differ(self._differing.keys() & places)

    def differ(self, places: Iterable[int]) -> None:
        """Replicas there differ from what they were to requests taken back: ``stands`` looks at them."""
        for place in places:
            self._differing[place] = self._promised.columns[:, place].tolist()

    def mend(self, is_mended: bool) -> None:
        """Set whether something that was taken back may be given again."""
        self.is_mended = is_mended
        if not is_mended:
            self._differing.clear()

    def stands(self, given: Given) -> bool:
        """Whether a request that was taken back would be given to the same replica again, to wait there."""
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
        """The first request given has ``num_matched_blocks`` blocks of its prompt cached at ``place``."""
        first = self.given[0]
        if first.matched.item(place) != num_matched_blocks:
            first.matched = first.matched.copy()
            first.matched[place] = num_matched_blocks
            first.note_rivals()

    def _num_standing(self, place: int, count: int) -> int:
        """How many of the first ``count`` requests given stand after news of the replica at ``place``: they are better
        off elsewhere, where they are, or have to wait there as before.
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
        """Whether ``given`` costs no more than before at its own ``place``, with that column, and cannot start yet."""
        if price > given.price or given.matched.item(place) != given.num_matched_blocks:
            return False
        ahead = self._told_ahead(place, given.due_s) + column[TOKENS]
        return price[0] or not self._steps_ahead.may_start(given.num_tokens, ahead, self._snapshot, place)

    def _reset(self, places: Set[int]) -> None:
        """Make the columns of ``places`` anew: the snapshot's, and what is ``given``."""
        if not self.given:
            self._promised.clear()
        self._promised.reset(places, self.given)
        self.differ(self._differing.keys() & places)

    def foresee(self, other: PlacedWish, block_size: int) -> None:
        """Another gateway's request comes before the next one here: set aside the room that it takes."""
        cluster = self._snapshot.matching(self._snapshot.num_matched_blocks, self._promised.columns)
        self.set_aside(*foresee(other, cluster, self.weights, block_size))

    def set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """Set aside room at ``place`` for a request of which only the size is known."""
        self._promised.add(place, num_blocks, num_tokens)
        if self.is_mended:
            self.differ((place,))
        if self._costs.size:
            times = 1.0 + self._promised.columns.item(SLOWER, place) * PER_CENT
            self._costs[:, place] += times * num_tokens
            self._costs[:, place] += times * self._sequence_prices

    def seen_by_next(self, candidates: Candidates) -> Candidates:
        """``candidates`` of the same moment, with all that was given away counted as promised."""
        if self.is_untouched:
            return candidates
        return candidates.matching(candidates.num_matched_blocks, self._promised.columns.copy())
