"""What a look has given away so far: held requests wait for replicas, and those behind them see what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, RESERVED_TOKENS, ROOM, URGENT, Ints, due_column, promise
from shoal_cluster.policies.considered import Assignment, Considered
from shoal_cluster.policies.foresight import foresee
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.native_plan import NativePlan
from shoal_cluster.policies.outlook import Outlook
from shoal_cluster.policies.ranking import comparable, is_eligible
from shoal_cluster.policies.room import has_room
from shoal_cluster.policies.route_query import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, load, price
from shoal_cluster.policies.steps_ahead import StepsAhead
from shoal_cluster.policies.wishes import PlacedWish


class Plan:
    """The cluster as each request sees it after room for those before it was given away.

    Args:
        snapshot: the cluster, for no prompt in particular.
        max_steps_ahead: how much work replicas may have before a request that is sent there; see ``StepsAhead``.
        patience: prompt tokens that a request waits for while a replica is idle, for each second left to its objective;
            0: all. See ``RouteQuery.patience_tokens``.
    """

    def __init__(
        self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float, patience: float = 0.0
    ) -> None:
        self.weights = weights
        self._patience = patience
        self._snapshot = snapshot
        self._steps_ahead = StepsAhead(max_steps_ahead)
        self._native = None if library is None else NativePlan(snapshot, weights, max_steps_ahead, patience)
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
            assignments, may_start = self._native.until_startable(self._columns, considered, plans_all)
            self._is_untouched &= not assignments and not considered[0].before
            return assignments, may_start
        return self._until_startable(considered, plans_all)

    def _until_startable(self, considered: Sequence[Considered], plans_all: bool) -> tuple[list[Assignment], bool]:
        """By numpy, which is slower than the native one."""
        assignments: list[Assignment] = []
        told = self._snapshot.told
        most, startable = self._steps_ahead.most(told), self._steps_ahead.may_start_urgent(told, self._columns)

        def note(places: Sequence[int]) -> None:
            for place in places:
                startable[place] &= self._columns.item(URGENT, place) <= most.item(place)

        for one in considered:
            if not (plans_all or startable.any()):
                break
            if one.before:
                note(self.foresee(one.before, one.query.block_size))
            place, is_roomy = self._best(one)
            num_matched = one.matched.item(place) if place >= 0 else 0
            if is_roomy and self.can_start(one.query, place, num_matched, one.due_s):
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
        if self._patience <= 0 or one.objective_s == math.inf:
            return None
        return math.floor((one.objective_s - self._snapshot.now) * self._patience)

    def is_late(self, one: Considered) -> bool:
        """Whether the objective of ``one`` is lost."""
        return one.objective_s < self._snapshot.now

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

    def _best(self, one: Considered) -> tuple[int, bool]:
        """The place of the request's best replica, -1 if none takes it; and whether it has room now."""
        cluster = self._seen(one.matched)
        query = replace(one.query, patience_tokens=self.patience_tokens(one), is_late=self.is_late(one))
        costs = comparable(price(query, cluster, self.weights), is_eligible(query, cluster))
        place = int(costs.argmin())
        return (place, has_room(query, cluster, place)) if costs[place] < math.inf else (-1, False)

    def _seen(self, matched: Ints) -> Candidates:
        return self._snapshot.matching(matched, self._columns)

    def _set_aside(self, place: int, num_blocks: int, num_tokens: int) -> None:
        self._own()
        self._is_untouched = False
        promise(self._columns, place, 1, num_blocks, num_tokens)

    def _own(self) -> None:
        if self._columns is self._snapshot.columns:
            self._columns = self._columns.copy()
