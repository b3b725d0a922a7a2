"""A held request as a look sees it, and what the look decides for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.route_query import BYTES_PER_PASSED, RouteQuery
from shoal_cluster.policies.wishes import PlacedWish

Assignment = tuple[int, int]
"""What a look decides for a request: the place of the replica that it is sent to or is to wait for, -1 for none; and
the blocks of its prompt that are cached there.
"""


@dataclass(slots=True, eq=False)
class Considered:
    """A held request as a look sees it. Not to be changed, nor copied: ``packed`` has addresses.

    Attributes:
        due_s: the date that it is sent with, on the clock of ``Candidates.now``.
        objective_s: when its first token is due by its objective, be that lost or not; infinite for none.
        matched: blocks cached on each replica, as looked up lately [n].
        before: other gateways' requests that come between it and the one considered before it.
        packed, referred: what ``NativePlan`` has made of it, for the next look, and the arrays that this refers to.
    """

    query: RouteQuery
    due_s: float
    matched: Ints
    before: tuple[PlacedWish, ...] = ()
    objective_s: float = math.inf
    packed: bytes = field(default=b"", init=False, repr=False)
    referred: tuple[object, ...] = field(default=(), init=False, repr=False)

    def impatient(self, patience_tokens: int) -> Considered:
        """The same, with ``RouteQuery.patience_tokens``."""
        query = replace(self.query, patience_tokens=patience_tokens)
        return Considered(query, self.due_s, self.matched, self.before, self.objective_s)

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes for each replica, in all."""
        passed = BYTES_PER_PASSED * len(self.query.passed)
        return self.matched.nbytes * (2 if passed else 1) + passed + len(self.packed)

    def is_of(
        self, query: RouteQuery, due_s: float, matched: Ints, before: tuple[PlacedWish, ...], objective_s: float
    ) -> bool:
        """Whether it would be made of these again."""
        is_same = self.query is query and self.due_s == due_s and self.objective_s == objective_s
        return is_same and self.matched is matched and self.before == before
