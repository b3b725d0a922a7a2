"""What a look has given away so far: held requests wait for replicas, and those behind them see what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, RESERVED_TOKENS, ROOM, URGENT, Ints, due_column, promise
from shoal_cluster.policies.considered import Assignment, Considered
from shoal_cluster.policies.foresight import foresee
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.native_plan import NativePlan
from shoal_cluster.policies.outlook import Outlook
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.route_query import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, idle_and_sooner, load, spared_tokens, work
from shoal_cluster.policies.steps_ahead import StepsAhead
from shoal_cluster.policies.wishes import PlacedWish


class Plan:
    """The cluster as each request sees it after room for those before it was given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: how much work replicas may have before a request that is sent there; see ``StepsAhead``.

    Attributes:
        patience: prompt tokens that a request waits for while a replica is idle, for each second left to its objective;
            0: all. See ``RouteQuery.patience_tokens``. Not to be changed once requests are planned.
    """

    def __init__(
        self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float, patience: float = 0.0
    ) -> None:
        self.weights = weights
        self.patience = patience
        self._snapshot = snapshot
        self._steps_ahead = StepsAhead(max_steps_ahead)
        self._native = None if library is None else NativePlan(snapshot, weights, max_steps_ahead)
        self._columns = snapshot.columns  # the snapshot's own until something may be given away
        self._is_untouched = True

    def outlook(self, token_s: float) -> Outlook:
        """What may still be started, and when, where a prompt token takes ``token_s``."""
        if self._native is not None:
            return self._native.outlook(self._columns, token_s)
        return Outlook.of(self._snapshot, self._columns, self._steps_ahead, token_s)

    def until_startable(self, considered: Sequence[Considered], plans_all: bool) -> tuple[list[Assignment], bool]:
        """Give ``considered`` requests to their best replicas, to wait there, one after another: up to one that seems
        able to start, or (without ``plans_all``) until no replica may start anything more. Other gateways' requests
        before each are given room, too. Returns the assignments, and whether the next request seems able to start.
        """
        if self._native is not None and considered:
            self._own()
            assignments, may_start = self._native.until_startable(self._columns, considered, self.patience, plans_all)
            self._is_untouched &= not assignments and not considered[0].before
            return assignments, may_start
        return self._until_startable(considered, plans_all)

    def _until_startable(self, considered: Sequence[Considered], plans_all: bool) -> tuple[list[Assignment], bool]:
        """By numpy, all requests at once: what is given to a replica makes it dearer, so the best one for a request
        stays the best until it is given something itself. Not so with patience, as the cheapest one then decides
        whether an idle one is better.
        """
        assignments: list[Assignment] = []
        best, dearer, told = self._best(considered), set[int](), self._snapshot.told
        most, startable = self._steps_ahead.most(told), self._steps_ahead.may_start_urgent(told, self._columns)

        def note(places: Sequence[int]) -> None:
            dearer.update(places)
            for place in places:
                startable[place] &= self._columns.item(URGENT, place) <= most.item(place)

        for one, (place, has_room) in zip(considered, best, strict=True):
            if not (plans_all or startable.any()):
                break
            if one.before:
                note(self.foresee(one.before, one.query.block_size))
            if place in dearer or (dearer and self.patience > 0):
                ((place, has_room),) = self._best([one])
            num_matched = one.matched.item(place) if place >= 0 else 0
            if has_room and self.can_start(one.query, place, num_matched, one.due_s):
                return assignments, True
            assignments.append((place, num_matched))
            if place >= 0:
                self.give(one.query, place, num_matched)
                note([place])
        return assignments, False

    def can_start(self, query: RouteQuery, place: int, num_matched_blocks: int, due_s: float) -> bool:
        """Whether the replica at ``place`` has time and room now for ``query``, due at ``due_s``."""
        columns, num_blocks = self._columns, max(1, uncached_blocks(query, num_matched_blocks))
        if columns.item(ROOM, place) < num_blocks or columns.item(CAPACITY, place) < 0:
            return False
        if query.passed:
            ahead = load(query, self._seen(self._snapshot.num_matched_blocks)).item(place)
        else:
            due_in_s = due_s - self._snapshot.now
            ahead = self._snapshot.told[due_column(due_in_s)].item(place) + columns.item(RESERVED_TOKENS, place)
        num_tokens = uncached_tokens(query, num_matched_blocks)
        return self._steps_ahead.may_start(num_tokens, ahead, self._snapshot, place)

    def patience_tokens(self, one: Considered) -> int | None:
        """``RouteQuery.patience_tokens`` of ``one`` now."""
        if self.patience <= 0 or one.objective_s == math.inf:
            return None
        return math.floor((one.objective_s - self._snapshot.now) * self.patience)

    def give(self, query: RouteQuery, place: int, num_matched_blocks: int) -> None:
        """The replica at ``place`` is to take ``query``, now or later: requests after it count on what is left."""
        num_tokens = uncached_tokens(query, num_matched_blocks)
        self._set_aside(place, uncached_blocks(query, num_matched_blocks), num_tokens)

    def foresee(self, others: Sequence[PlacedWish], block_size: int) -> list[int]:
        """Other gateways' requests come before the next one here: set aside the room that they take. Returns where."""
        places: list[int] = []
        for other in others:
            cluster = self._seen(self._snapshot.num_matched_blocks)
            place, *size = foresee(other, cluster, self.weights, block_size)
            self._set_aside(place, *size)
            places.append(place)
        return places

    def seen_by_next(self, candidates: Candidates) -> Candidates:
        """``candidates`` of the same moment, with all that was given away counted as promised."""
        if self._is_untouched:
            return candidates
        return candidates.matching(candidates.num_matched_blocks, self._columns.copy())

    def _best(self, considered: Sequence[Considered]) -> list[tuple[int, bool]]:
        """For each of ``considered``: the place of its best replica, -1 if none takes it; and whether there is room."""
        if not considered:
            return []
        queries, columns = [one.query for one in considered], self._columns
        matched, cluster = np.stack([one.matched for one in considered]), self._seen(considered[0].matched)
        size = np.array([(query.num_prompt_tokens, query.num_blocks_needed, query.block_size) for query in queries])
        uncached = np.maximum(size[:, :1] - matched * size[:, 2:], 1)
        prices = np.array([[self.weights.sequence_price(query.decode_steps)] for query in queries])
        before = columns[LOAD]
        if any(query.passed for query in queries):
            before = np.stack([load(query, cluster) for query in queries])
        takes = columns[CAPACITY] >= size[:, 1:2]
        for number, query in enumerate(queries):
            if query.is_restricted:
                takes[number] = is_eligible(query, cluster)
        spared = np.stack([spared_tokens(one.query, one.matched) for one in considered])
        costs = np.where(takes, work(cluster, uncached, spared, prices, self.weights, before), np.inf)
        has_room = columns[ROOM] >= np.maximum(size[:, 1:2] - matched, 1)
        with_room = np.where(has_room, costs, np.inf)
        roomy, cheapest, rows = with_room.argmin(axis=1), costs.argmin(axis=1), np.arange(len(queries))
        is_roomy = with_room[rows, roomy] < np.inf
        places = np.where(is_roomy, roomy, np.where(costs[rows, cheapest] < np.inf, cheapest, -1)).tolist()
        for number, one in enumerate(considered):
            if is_roomy[number] and (most := self.patience_tokens(one)) is not None:
                idle = idle_and_sooner(one.query, self._seen(one.matched), with_room[number], most)
                if idle is not None and (idle & (with_room[number] < np.inf)).any():
                    places[number] = int(np.where(idle, with_room[number], np.inf).argmin())
        return list(zip(places, is_roomy.tolist(), strict=True))

    def _seen(self, matched: Ints) -> Candidates:
        return self._snapshot.matching(matched, self._columns)

    def _set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        self._own()
        self._is_untouched = False
        promise(self._columns, place, 1, num_blocks, num_tokens)

    def _own(self) -> None:
        if self._columns is self._snapshot.columns:
            self._columns = self._columns.copy()
