"""Which tenants have had far more than a fair share of the service, so that others go first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_S = 10.0  # past service fades to 1/e in this time, "a memory" below
MOST_UNSERVED = 1 / 16  # memories that pass at most for waiting tenants between two services: slowness is no pause
FORGOTTEN_S = 4 * MEMORY_S  # after its last service a tenant that holds nothing is forgotten
HEAVY = 3.0  # times the fair level
MOST_BEFORE = 0.4  # of the service, by tenants not heavy: the more goes before the heavy ones, the later they are
FLOOD = 2.5  # even then a tenant is heavy that asks for this many times its even share
MAX_PLACE = 16
ROUNDING = 1e-9
COUNTED_ANEW = 8  # after changes to an eighth of the tenants: the cost of one does not depend on their number


@dataclass(slots=True)
class _Service:
    """What one tenant has had, in tokens as of age 0: earlier ones count less."""

    num_tokens: float = 0.0
    largest: float = 0.0  # the largest request's part of these
    last_s: float = 0.0


class FairShares:
    """Each tenant's recent service, in prompt tokens computed.

    The fair level is the average service of the tenants that have had no more than the average of all. A tenant that
    has had nothing counts if it holds a request at least as urgent as the one served last. A tenant is heavy if it has
    had more than ``HEAVY`` times the fair level, its largest request aside: requests come whole and at random, and
    among tenants with similar demand due dates alone should decide. All tenants that ask for far more than another are
    heavy, however alike they are. Where the others together have had much of the service (many tenants of all sizes),
    only those are heavy that ask for far more than there is for them: letting so many others go first makes a tenant
    late.

    Attributes:
        version: while it is the same, so is every tenant's ``place``.
    """

    def __init__(self) -> None:
        self.version = 0
        self._num_held: dict[tuple[str, int], int] = {}  # by tenant and priority
        self._held_by: dict[str, int] = {}
        self._asked: dict[str, float] = {}  # tokens asked for lately, as of age 0
        self._level: float | None = None  # the even one, once it was needed; as of this age:
        self._level_age = 0.0
        self._clock = 0.0  # memories that had passed for waiting tenants at the last count
        self._priority = 0  # of the request that was served last
        self._served: dict[str, _Service] = {}
        self._age = 0.0  # memories since the last count
        self._left = MOST_UNSERVED  # of a memory that may still pass for waiting tenants
        self._time_s = -math.inf
        self._num_since = 0  # changes since the last count
        self._places: dict[str, int] = {}  # of heavy tenants

    def enter(self, tenant: str, now: float, priority: int = 0) -> None:
        """From ``now`` (seconds) the tenant holds one more request of that priority, lower being more urgent."""
        self._pass_time(now)
        self._held_by[tenant] = self._held_by.get(tenant, 0) + 1
        self._num_held[tenant, priority] = num_held = self._num_held.get((tenant, priority), 0) + 1
        if num_held == 1 and tenant not in self._served:
            self._note_change()

    @property
    def clock(self) -> float:
        """The time in memories, for ``ask``."""
        return self._clock + self._age

    def ask(self, tenant: str, num_tokens: int, asked_at: float) -> None:
        """A request that it holds since ``asked_at`` on the ``clock`` has ``num_tokens`` more, or fewer, to compute."""
        self._asked[tenant] = self._asked.get(tenant, 0.0) + num_tokens * math.exp(asked_at - self._clock)

    def leave(self, tenant: str, priority: int = 0) -> None:
        """The tenant holds one request of that priority less."""
        if num_left := self._held_by.pop(tenant) - 1:
            self._held_by[tenant] = num_left
        if num_left := self._num_held.pop((tenant, priority)) - 1:
            self._num_held[tenant, priority] = num_left
        elif tenant not in self._served:
            self._note_change()

    def charge(self, tenant: str, num_tokens: float, now: float, priority: int = 0) -> None:
        """``tenant``, which still holds the request, gets service of ``num_tokens`` at ``now``."""
        self._pass_time(now)
        self._age += max(0.0, now - self._time_s) / MEMORY_S
        self._time_s, self._left, self._priority = max(now, self._time_s), MOST_UNSERVED, priority
        weighed = num_tokens * math.exp(self._age)
        its = self._served.setdefault(tenant, _Service())
        its.num_tokens, its.largest, its.last_s = its.num_tokens + weighed, max(its.largest, weighed), now
        self._note_change()

    def fade(self, now: float) -> None:
        """Let earlier service fade, in case no request has been served for long."""
        if self._served and now - self._time_s >= MEMORY_S:
            self._pass_time(now)

    def place(self, tenant: str) -> int:
        """In the order of tenants: 0; for a heavy one 1, and 1 more for each doubling of its service over the limit."""
        return self._places.get(tenant, 0)

    def had_more(self, tenant: str) -> bool:
        """Whether it is heavy."""
        return tenant in self._places

    def had_less(self, tenant: str) -> bool:
        """Whether other tenants are heavy and it is not."""
        return bool(self._places) and tenant not in self._places

    def is_over(self, tenant: str) -> bool:
        """Whether it asks for more than its max-min fair share: all is shared evenly, and no tenant gets more than it
        asks for. False for every tenant where there is enough for all.
        """
        if self._level is None:
            names = self._served.keys() | self._unserved()
            self._level = self._even_level(names) if len(names) > 1 else math.inf
            self._level_age = self._age
        level = self._level * math.exp(self._age - self._level_age)  # steady demand has added up to more by now
        return self._asked.get(tenant, 0.0) > level * (1 + ROUNDING)

    @property
    def are_even(self) -> bool:
        """Whether no tenant is heavy."""
        return not self._places

    def _pass_time(self, now: float) -> None:
        """Advance the clock to ``now``. A gap shorter than MOST_UNSERVED counts with the next service or longer gap."""
        passed = (now - self._time_s) / MEMORY_S
        if passed > MOST_UNSERVED or self._age > 1:
            self._time_s = max(now, self._time_s)
            self._count_anew(max(0.0, passed))

    def _note_change(self) -> None:
        self._num_since += 1
        if not self._places and len(self._served) == 1 and self._held_by.keys() <= self._served.keys():
            self._level = None
            return  # there is nobody to share with
        if self._num_since * COUNTED_ANEW >= len(self._served) + len(self._held_by):
            self._count_anew(0.0)

    def _count_anew(self, passed: float) -> None:
        """Let the past fade, and find the heavy tenants. ``passed``: memories in which no request was served."""
        for_waiting = min(passed, self._left)
        self._left -= for_waiting
        faded, faded_waiting = math.exp(-self._age - passed), math.exp(-self._age - for_waiting)
        self._clock += self._age + for_waiting
        self._age, self._num_since, self._level = 0.0, 0, None
        last_s = self._time_s - FORGOTTEN_S
        self._served = {n: its for n, its in self._served.items() if its.last_s > last_s or n in self._held_by}
        for name, its in self._served.items():
            part = faded_waiting if name in self._held_by else faded
            its.num_tokens, its.largest = its.num_tokens * part, its.largest * part
        self._asked = {
            name: asked * (faded_waiting if name in self._held_by else faded)
            for name, asked in self._asked.items()
            if name in self._served or name in self._held_by
        }
        places = self._find_places()
        self.version += places != self._places
        self._places = places

    def _unserved(self) -> set[str]:
        """Tenants that wait no less urgently than the one served last, and have had nothing."""
        return {name for name, priority in self._num_held if priority <= self._priority} - self._served.keys()

    def _find_places(self) -> dict[str, int]:
        unserved = self._unserved()
        num_all = len(self._served) + len(unserved)
        if num_all < 2:
            return {}
        num_tokens = sum([its.num_tokens for its in self._served.values()])
        average = num_tokens / num_all
        least = [its.num_tokens for its in self._served.values() if its.num_tokens <= average]
        if not (least or unserved):  # all have had the same, but for rounding
            return {}
        level = max(1.0, HEAVY * sum(least) / (len(least) + len(unserved)))
        more = {name: its for name, its in self._served.items() if its.num_tokens > average}
        over = {name: (its.num_tokens - its.largest) / level for name, its in more.items()}
        heavy = {name: min(MAX_PLACE, 1 + int(math.log2(times))) for name, times in over.items() if times > 1}
        if not heavy or num_tokens - sum([self._served[name].num_tokens for name in heavy]) <= MOST_BEFORE * num_tokens:
            return heavy
        most = FLOOD * self._even_level(self._served.keys() | unserved)
        return {name: place for name, place in heavy.items() if self._asked.get(name, 0.0) > most}

    def _even_level(self, names: Iterable[str]) -> float:
        """The most tokens that each gets if what was served is shared evenly; infinite if that is enough for all."""
        num_tokens = sum([its.num_tokens for its in self._served.values()])
        asked = sorted([self._asked.get(name, 0.0) for name in names])
        for number, least in enumerate(asked):
            num_left = len(asked) - number
            if least * num_left >= num_tokens:
                return num_tokens / num_left
            num_tokens -= least
        return math.inf
