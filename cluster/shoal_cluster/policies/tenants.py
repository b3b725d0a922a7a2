"""Who has had far more than a fair share of the service, so that others go first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_S = 10.0  # of who was served lately
MOST_UNSERVED = 1 / 16  # memories that pass for who waits until the next is served: to be slow is no pause
FORGOTTEN_S = 4 * MEMORY_S  # since its last service, of who does not wait
HEAVY = 3.0  # times the fair level
MOST_BEFORE = 0.4  # of the service, of all who are not: to go before others costs these the more, the more it is
FLOOD = 2.5  # times what is left for each, of what one asks for
MAX_PLACE = 16
ROUNDING = 1e-9
COUNTED_ANEW = 8  # as many changes as an eighth of the tenants: a change costs the same however many there are


@dataclass(slots=True)
class _Service:
    """Of one tenant; tokens as of age 0, those of before counting less."""

    num_tokens: float = 0.0
    largest: float = 0.0  # what one request had of these
    last_s: float = 0.0


class FairShares:
    """Each tenant's service of late, in prompt tokens computed.

    The fair level is what those have had on average who have had no more than the average of all; who waits, no less
    urgently than who was served last, and has had nothing counts. A tenant is heavy that has had more than ``HEAVY``
    times as much, its largest request aside: requests come whole and at random, and among tenants that ask alike due
    dates alone are to decide who goes first. All that ask for far more than another are heavy, alike or not. Where the
    others have had much of the service together (many of all sizes), only those are heavy that ask for far more than
    there is for them: who lets so many go first is late.

    Attributes:
        num_changes: while it is the same, so is every tenant's ``place``.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_held = Counter[tuple[str, int]]()  # by tenant and priority
        self._held_by = Counter[str]()
        self._asked: dict[str, float] = {}  # tokens of late, as of age 0
        self._level: float | None = None  # the even one, once it was asked for, at
        self._level_age = 0.0
        self._clock = 0.0  # memories of who waits, until all was counted
        self._priority = 0  # of who was served last
        self._served: dict[str, _Service] = {}
        self._age = 0.0  # memories since all was counted
        self._left = MOST_UNSERVED  # of them for who waits
        self._time_s = -math.inf
        self._num_since = 0  # changes since all was counted
        self._places: dict[str, int] = {}  # of who is heavy

    def enter(self, tenant: str, now: float, priority: int = 0) -> None:
        """The tenant holds one more request of that priority, the lower the more urgent, from ``now`` on, seconds."""
        self._pass_time(now)
        self._held_by[tenant] += 1
        self._num_held[tenant, priority] += 1
        if self._num_held[tenant, priority] == 1 and tenant not in self._served:
            self._note_change()

    @property
    def clock(self) -> float:
        """What time it is, for ``ask``."""
        return self._clock + self._age

    def ask(self, tenant: str, num_tokens: int, asked_at: float) -> None:
        """A request that it holds since the ``clock`` was so has so many tokens more to compute, or fewer."""
        self._asked[tenant] = self._asked.get(tenant, 0.0) + num_tokens * math.exp(asked_at - self._clock)

    def leave(self, tenant: str, priority: int = 0) -> None:
        """And one less."""
        self._held_by[tenant] -= 1
        self._num_held[tenant, priority] -= 1
        if not self._held_by[tenant]:
            del self._held_by[tenant]
        if not self._num_held[tenant, priority]:
            del self._num_held[tenant, priority]
            if tenant not in self._served:
                self._note_change()

    def charge(self, tenant: str, num_tokens: float, now: float, priority: int = 0) -> None:
        """``tenant``, which holds the request still, gets service of ``num_tokens`` at ``now``."""
        self._pass_time(now)
        self._age += max(0.0, now - self._time_s) / MEMORY_S
        self._time_s, self._left, self._priority = max(now, self._time_s), MOST_UNSERVED, priority
        weighed = num_tokens * math.exp(self._age)
        its = self._served.setdefault(tenant, _Service())
        its.num_tokens, its.largest, its.last_s = its.num_tokens + weighed, max(its.largest, weighed), now
        self._note_change()

    def fade(self, now: float) -> None:
        """Nobody may have been served for long: what was then counts no more."""
        if self._served and now - self._time_s >= MEMORY_S:
            self._pass_time(now)

    def place(self, tenant: str) -> int:
        """In the order of tenants: 0, but of who is heavy one more for each doubling of what it has had."""
        return self._places.get(tenant, 0)

    def had_more(self, tenant: str) -> bool:
        """Whether it is heavy."""
        return tenant in self._places

    def had_less(self, tenant: str) -> bool:
        """Whether others are, and it is not."""
        return bool(self._places) and tenant not in self._places

    def is_over(self, tenant: str) -> bool:
        """Whether it asks for more than there is for each where all is shared evenly and nobody has more than it asks
        for (max-min fairness): nobody does where there is enough for all.
        """
        if self._level is None:
            names = self._served.keys() | self._unserved()
            self._level = self._even_level(names) if len(names) > 1 else math.inf
            self._level_age = self._age
        level = self._level * math.exp(self._age - self._level_age)  # who asks steadily has asked for more by now
        return self._asked.get(tenant, 0.0) > level * (1 + ROUNDING)

    @property
    def are_even(self) -> bool:
        """Whether nobody is heavy."""
        return not self._places

    def _pass_time(self, now: float) -> None:
        """Little of it waits for the next service, or until it is more."""
        passed = (now - self._time_s) / MEMORY_S
        if passed > MOST_UNSERVED or self._age > 1:
            self._time_s = max(now, self._time_s)
            self._count_anew(max(0.0, passed))

    def _note_change(self) -> None:
        self._num_since += 1
        if self._num_since * COUNTED_ANEW >= len(self._served) + len(self._held_by):
            self._count_anew(0.0)

    def _count_anew(self, passed: float) -> None:
        """Forget what is long ago, and find out who is heavy. ``passed``: memories in which nobody was served."""
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
        self.num_changes += places != self._places
        self._places = places

    def _unserved(self) -> set[str]:
        """Who waits no less urgently than who was served last, and has had nothing."""
        return {name for name, priority in self._num_held if priority <= self._priority} - self._served.keys()

    def _find_places(self) -> dict[str, int]:
        unserved = self._unserved()
        num_all = len(self._served) + len(unserved)
        if num_all < 2:
            return {}
        num_tokens = sum([its.num_tokens for its in self._served.values()])
        average = num_tokens / num_all
        least = [its.num_tokens for its in self._served.values() if its.num_tokens <= average]
        if not (least or unserved):  # by rounding: all have had the same
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
        """Tokens that each of them has at most where what was served is shared evenly; infinite where it is enough."""
        num_tokens = sum([its.num_tokens for its in self._served.values()])
        asked = sorted([self._asked.get(name, 0.0) for name in names])
        for number, least in enumerate(asked):
            num_left = len(asked) - number
            if least * num_left >= num_tokens:
                return num_tokens / num_left
            num_tokens -= least
        return math.inf
