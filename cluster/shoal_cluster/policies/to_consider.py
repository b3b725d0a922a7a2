"""Builds what a look considers: for each of the most urgent held requests its query, due date and cached blocks. What
has not changed since the last look is used again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shoal_cluster.policies.alike import Alike, Shared
from shoal_cluster.policies.columns import Ints, due_column
from shoal_cluster.policies.considered import Considered
from shoal_cluster.policies.held import Held
from shoal_cluster.policies.held_order import HeldOrder
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.tenants import FairShares
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import PlacedWish
from shoal_cluster.policies.yielding import Yielding

MAX_MATCH_AGE_S = 0.5  # what is cached of a prompt is looked up again when its match is older
MAX_FIRST_MATCH_AGE_S = 0.05  # the same for the most urgent request

Order = Sequence[tuple[Held, float]]
"""Requests in the order in which a look considers them, each with its due date."""

Passed = tuple[tuple[str, int], ...]
"""``RouteQuery.passed``."""


class ToConsider:
    """Owned by a queue. What one look has gone by is kept for the next one.

    Args:
        yielding: the requests that yield to others.
        is_one_of_many: other gateways' wishes come in between.
    """

    def __init__(
        self, shares: FairShares, by_urgency: HeldOrder, yielding: Yielding, alike: Alike, is_one_of_many: bool
    ) -> None:
        self._shares = shares
        self._alike = alike
        self._by_urgency = by_urgency
        self._yielding = yielding
        self._is_one_of_many = is_one_of_many
        self._kept: list[Considered] = []  # of this order and these replicas
        self._kept_order: Order = ()
        self._kept_ids: tuple[str, ...] = ()
        self._kept_until_s = -math.inf
        self._kept_version = 0  # ``Alike.version`` then

    def forget(self) -> None:
        """Something that was kept is no longer up to date."""
        self._kept_order = ()

    def of(self, order: Order, view: ClusterView, now: float) -> Iterable[Considered]:
        """The requests of ``order`` as a look sees them, with other gateways' wishes between them."""
        is_same = order is self._kept_order and view.replica_ids is self._kept_ids
        if is_same and now < self._kept_until_s and self._alike.version == self._kept_version:
            return self._kept
        return self._each(order, view, now)

    def _each(self, order: Order, view: ClusterView, now: float) -> Iterator[Considered]:
        """One after another: where tenants are uneven that takes time, and a look may need only the first."""
        considered: list[Considered] = []
        version = self._alike.version  # more may come: those before are then to be told anew
        is_even, until_s = self._shares.are_even, math.inf
        present = view.present(now)
        foreign = iter(view.wishes(now) if self._is_one_of_many else ())
        other = next(foreign, None)
        passed: dict[str, Passed] = {}  # by the column of due dates
        for held, due_s in order:
            max_age_s = MAX_MATCH_AGE_S if considered else MAX_FIRST_MATCH_AGE_S
            matched = look_up(held, view, now, max_age_s)
            if matched is not held.noted and len(order) > 1:
                self._alike.note(held, present)
            one, base = held.considered, held.pending.query
            until_s = min(until_s, held.matched_s + max_age_s)
            before: tuple[PlacedWish, ...] = ()
            while other is not None and other.wish.rank < self._by_urgency.rank(held):
                before += (other,)
                other = next(foreign, None)
            passes = base.passed
            if not is_even and self._shares.had_less(held.pending.tenant):
                due = due_column(due_s - now)
                if due not in passed:
                    passed[due] = self._yielding.passed(view, now, due_s - now)
                passes = passed[due]
            shared = self._alike.of(held)
            query = base if one is None else one.query
            if not _says(query, passes, shared):
                query = base if _says(base, passes, shared) else _saying(base, passes, shared)
            objective_s = held.objective_s
            if one is None or not one.is_of(query, due_s, matched, before, objective_s):
                one = held.considered = Considered(query, due_s, matched, before, objective_s)
            considered.append(one)
            yield one
        self._kept, self._kept_ids, self._kept_until_s = considered, view.replica_ids, until_s
        self._kept_version = version
        self._kept_order = order if is_even and not self._is_one_of_many else ()


def _says(query: RouteQuery, passed: Passed, shared: Shared) -> bool:
    """Whether that is what it says of other requests."""
    is_same = (query.num_known_blocks, query.num_alike, query.num_holders) == shared
    return is_same and (query.passed is passed or query.passed == passed)


def _saying(query: RouteQuery, passed: Passed, shared: Shared) -> RouteQuery:
    known, alike, holders = shared
    return replace(query, passed=passed, num_known_blocks=known, num_alike=alike, num_holders=holders)


def look_up(held: Held, view: ClusterView, now: float, max_age_s: float = MAX_MATCH_AGE_S) -> Ints:
    """Blocks of its prompt cached on each replica [n], as looked up no longer than ``max_age_s`` ago."""
    if held.matched_of is not view.replica_ids:
        held.assignment, held.matched_s = None, -math.inf  # its place is one of other replicas
    if held.matched_s < now - max_age_s:
        held.note_match(view.match(held.pending.query.block_hashes), view.replica_ids, now)
    return held.matched
