"""Who has had far more than a fair share of the service, so that others go first."""

from __future__ import annotations

import math
from collections import Counter

MEMORY_S = 10.0  # of who was served lately;
MEMORY_REQUESTS = 16  # and of who waits of as many requests: a slow cluster does not forget sooner than a fast one
FORGOTTEN_TOKENS = 16.0
HEAVY = 3.0  # times the fair level
MAX_PLACE = 16
COUNTED_ANEW = 8  # as many changes as an eighth of the tenants: a change costs the same however many there are


class FairShares:
    """Each tenant's service of late, in prompt tokens computed.

    The fair level is what those have had on average who have had no more than the average of all; who waits and has
    had nothing counts. A tenant is heavy that has had more than ``HEAVY`` times as much, its largest request aside:
    requests come whole and at random, and among tenants that ask alike due dates alone are to decide who goes first.

    Attributes:
        num_changes: while it is the same, so is every tenant's ``place``.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_held = Counter[str]()
        self._num_unserved = 0  # of who waits, those that are not in ``_served``
        self._served: dict[str, float] = {}  # tokens as of ``_age`` 0, those of before counting less
        self._largest: dict[str, float] = {}  # what one request had of these
        self._age = 0.0  # since all was counted, in memories
        self._time_s = -math.inf
        self._num_since = 0  # changes since then
        self._places: dict[str, int] = {}  # of who is heavy

    def enter(self, tenant: str, now: float) -> None:
        """The tenant holds one more request from ``now`` on, seconds."""
        if tenant not in self._num_held:
            self._pass_time(now)  # as it did while the tenant wanted nothing
        self._num_held[tenant] += 1
        if self._num_held[tenant] == 1 and tenant not in self._served:
            self._num_unserved += 1
            self._note_change()

    def leave(self, tenant: str) -> None:
        """And one less."""
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
            if tenant not in self._served:
                self._num_unserved -= 1
                self._note_change()

    def charge(self, tenant: str, num_tokens: float, now: float) -> None:
        """``tenant`` gets service of ``num_tokens`` at ``now``, seconds."""
        self._pass_time(now)
        if tenant not in self._served and tenant in self._num_held:
            self._num_unserved -= 1
        weighed = num_tokens * math.exp(self._age)
        self._served[tenant] = self._served.get(tenant, 0.0) + weighed
        self._largest[tenant] = max(self._largest.get(tenant, 0.0), weighed)
        self._note_change()

    def fade(self, now: float) -> bool:
        """Nobody may have been served for long: what was then counts no more. Whether that changes anybody's place."""
        if not self._served or now - self._time_s < MEMORY_S:
            return False
        num_changes = self.num_changes
        self._pass_time(now)
        return self.num_changes != num_changes

    def place(self, tenant: str) -> int:
        """In the order of tenants: 0, but of who is heavy one more for each doubling of what it has had."""
        return self._places.get(tenant, 0)

    def had_more(self, tenant: str) -> bool:
        """Whether it is heavy."""
        return tenant in self._places

    def had_less(self, tenant: str) -> bool:
        """Whether others are, and it is not."""
        return bool(self._places) and tenant not in self._places

    @property
    def are_even(self) -> bool:
        """Whether nobody is heavy."""
        return not self._places

    def _pass_time(self, now: float) -> None:
        passed = (now - self._time_s) / MEMORY_S
        if passed <= 0:
            return
        self._time_s = now
        if passed > 1 / MEMORY_REQUESTS:
            self._count_anew(passed)
        else:
            self._age += passed

    def _note_change(self) -> None:
        self._num_since += 1
        if self._num_since * COUNTED_ANEW >= len(self._served) + self._num_unserved:
            self._count_anew()

    def _count_anew(self, passed: float = 0.0) -> None:
        """Forget what is long ago, and find out who is heavy. ``passed``: memories in which nothing changed."""
        its_share = {name: math.exp(-self._age - self._passed_for(name, passed)) for name in self._served}
        self._age, self._num_since = 0.0, 0
        left = {name: its * its_share[name] for name, its in self._served.items()}
        self._served = {name: its for name, its in left.items() if its > FORGOTTEN_TOKENS}
        self._largest = {name: self._largest[name] * its_share[name] for name in self._served}
        self._num_unserved = sum(name not in self._served for name in self._num_held)
        places = self._find_places()
        self.num_changes += places != self._places
        self._places = places

    def _passed_for(self, tenant: str, passed: float) -> float:
        """Who waits has gone on wanting service: that it was slow to come is no pause."""
        return min(passed, 1 / MEMORY_REQUESTS) if tenant in self._num_held else passed

    def _find_places(self) -> dict[str, int]:
        num_all = len(self._served) + self._num_unserved
        if num_all < 2:
            return {}
        average = sum(self._served.values()) / num_all
        least = [its for its in self._served.values() if its <= average]
        level = max(1.0, HEAVY * sum(least) / (len(least) + self._num_unserved))
        over = {name: (its - self._largest[name]) / level for name, its in self._served.items() if its > average}
        return {name: min(MAX_PLACE, 1 + int(math.log2(times))) for name, times in over.items() if times > 1}
