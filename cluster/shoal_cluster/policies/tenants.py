"""Who has had more than a fair share of the service, so that others go first."""

from __future__ import annotations

import math

BURST_TOKENS = 2048.0
MAX_EXCESS_TOKENS = 2.0**17  # the longest of prompts
MEMORY_S = 10.0  # of who was served lately
FORGOTTEN_TOKENS = 1.0
AFTER_OTHERS = 2**20


class FairShares:
    """Each tenant's service beyond its share, in prompt tokens computed. While ``num_changes`` is the same, so is every
    tenant's ``place``.

    What one tenant is sent counts against it and is paid back by all who want such service at that moment, in equal
    parts: a deficit, as in deficit round robin (Shreedhar and Varghese, 1995). Nothing is saved up: a tenant that
    wanted nothing begins with nothing. Nor is much held against anybody for long: of who wants nothing it fades.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_held: dict[tuple[str, int], int] = {}  # by tenant and priority
        self._excess: dict[str, float] = {}
        self._served: dict[str, float] = {}  # tokens, those of long ago counting less
        self._num_served = 0.0  # their sum
        self._served_s = 0.0

    def enter(self, tenant: str, priority: int = 0) -> None:
        """The tenant holds one more request of that priority, the lower the more urgent."""
        self._num_held[tenant, priority] = self._num_held.get((tenant, priority), 0) + 1

    def leave(self, tenant: str, priority: int = 0) -> None:
        """And one less."""
        self._num_held[tenant, priority] -= 1
        if not self._num_held[tenant, priority]:
            del self._num_held[tenant, priority]

    def fade(self, now: float) -> bool:
        """Nobody may have been served for long: what was then counts no more. Whether that changes anybody's place."""
        if now - self._served_s < MEMORY_S or not (self._served or self._excess):
            return False
        did_differ = self._may_differ
        self._fade(now)
        self.num_changes += did_differ
        return did_differ

    def charge(self, tenant: str, num_tokens: float, now: float, priority: int = 0) -> None:
        """``tenant`` gets service of ``num_tokens`` at ``now``, seconds, for a request of that priority: those who
        wait with lower ones do not want such.
        """
        if not (self._num_held or self._excess) and self._served.keys() <= {tenant}:  # nobody to share with
            before = self._served.get(tenant, 0.0) * self._faded(now)
            self._num_served = (before if before > FORGOTTEN_TOKENS else 0.0) + num_tokens
            self._served[tenant], self._served_s = self._num_served, now
            return
        did_differ = self._may_differ
        self._fade(now)
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens
        self._num_served = sum(self._served.values())
        self._excess[tenant] = min(self._excess.get(tenant, 0.0) + num_tokens, MAX_EXCESS_TOKENS)
        sharers = self._excess.keys() | {name for name, its in self._num_held if its <= priority}
        part = num_tokens / len(sharers)
        self._excess = {name: left for name, excess in self._excess.items() if (left := excess - part) > 0}
        self.num_changes += did_differ or self._may_differ

    def excess(self, tenant: str) -> int:
        """How many bursts the tenant is over its share; 0 for all that are not."""
        return int(self._excess.get(tenant, 0.0) / BURST_TOKENS)

    def place(self, tenant: str) -> int:
        """In the order of tenants, from 0: by excess; who had more than others lately comes after all who had not."""
        if not self._excess and len(self._served) < 2:
            return 0
        return self.excess(tenant) + AFTER_OTHERS * self.had_more(tenant)

    def had_more(self, tenant: str) -> bool:
        """Whether of those served lately it had more than an equal part."""
        return self._served.get(tenant, 0.0) * len(self._served) > self._num_served

    @property
    def are_even(self) -> bool:
        """Whether nobody had more than others."""
        return len(self._served) < 2

    @property
    def are_several(self) -> bool:
        """Whether more than one was served lately or waits."""
        return len(self._served.keys() | {name for name, _ in self._num_held}) > 1

    def had_less(self, tenant: str) -> bool:
        """Whether others had more than it."""
        return self._served.get(tenant, 0.0) * len(self._served) < self._num_served

    @property
    def _may_differ(self) -> bool:
        """Whether places may differ."""
        return bool(self._excess) or len(self._served) > 1

    def _faded(self, now: float) -> float:
        return math.exp(min(0.0, self._served_s - now) / MEMORY_S)

    def _fade(self, now: float) -> None:
        faded = self._faded(now)
        self._served = {n: left for n, served in self._served.items() if (left := served * faded) > FORGOTTEN_TOKENS}
        if self._excess:
            here = {name for name, _ in self._num_held}
            its_left = {name: excess if name in here else excess * faded for name, excess in self._excess.items()}
            self._excess = {name: left for name, left in its_left.items() if left > FORGOTTEN_TOKENS}
        self._num_served = sum(self._served.values())
        self._served_s = now
