"""Held requests in two orders: by rank, and by when each has to begin at the latest to meet its date."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate, islice

from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.held import Held
from shoal_cluster.policies.tenants import FairShares
from shoal_cluster.policies.wishes import Rank

Entry = tuple[Rank, int, Held]
BeginsBy = tuple[float, int, Held]
Due = tuple[Held, float]
"""A request, and its due date."""


class HeldOrder:
    """Kept sorted as requests come and change, so that a look at hundreds moves only the few that have changed. Owned
    by a queue, whose requests these are. Ties go by arrival at this gateway.

    A look considers the first ``num_considered`` requests, and for each of them that is restricted (only some replicas
    may take it) one more that is not, and one that is so in another way: restricted requests must not keep others from
    the remaining replicas.

    Args:
        later_s: how much later a heavy tenant's requests are due at a replica, so that other tenants' go before them,
            even those that arrive while they wait for the running step (unless those are very long prompts). Among
            themselves a heavy tenant's requests keep their order.
    """

    def __init__(self, shares: FairShares, num_considered: int, later_s: float) -> None:
        self._shares = shares
        self._later_s = later_s
        self._num_considered = num_considered
        self._last_considered: float = num_considered  # changes beyond this place leave ``_to_consider`` as it is
        self._num_restricted = 0
        self._least_capacity: float = math.inf
        self._to_consider: list[Due] | None = None  # None: to be worked out
        self._shares_version = shares.version
        self._num_put = 0
        self._ranked: list[Entry] = []
        self._tokens: list[int] = []  # of each entry of ``_ranked``: what it has to compute
        self._by_begin: list[BeginsBy] = []

    @property
    def begins_by_s(self) -> float:
        """The earliest time by which some request has to begin to meet its date; infinite if none is held."""
        return self._by_begin[0][0] if self._by_begin else math.inf

    def put(self, held: Held) -> None:
        """Add a request, or move it because its dates have changed."""
        if self._shares_version != self._shares.version:
            self._rank_anew()
        begins_by_s = held.due_s - held.takes_s
        if held.entry is None or held.begins_by is None:
            self._num_put += 1
            number = self._num_put
        elif held.begins_by[0] == begins_by_s and held.entry[0][2] == held.due_s:
            self._tokens[bisect_left(self._ranked, held.entry)] = held.num_new_tokens
            return
        else:
            number = held.entry[1]
            self.remove(held)
        held.entry = (self.rank(held), number, held)
        held.begins_by = (begins_by_s, number, held)
        held.is_restricted = self._is_restricted(held)
        self._num_restricted += held.is_restricted
        place = bisect_left(self._ranked, held.entry) if self._ranked else 0
        self._ranked.insert(place, held.entry)
        self._tokens.insert(place, held.num_new_tokens)
        insort(self._by_begin, held.begins_by)
        if place < self._last_considered:
            self._to_consider = None

    def move_all(self) -> None:
        """The dates of all requests may have changed: sort once, not one by one."""
        self._shares_version, self._to_consider = self._shares.version, None
        ranked: list[Entry] = []
        by_begin: list[BeginsBy] = []
        for _, number, held in self._ranked:
            held.entry = (self.rank(held), number, held)
            held.begins_by = (held.due_s - held.takes_s, number, held)
            ranked.append(held.entry)
            by_begin.append(held.begins_by)
        self._sort(ranked)
        self._by_begin = sorted(by_begin)

    def remove(self, held: Held) -> None:
        """Take a request out."""
        assert held.entry is not None
        assert held.begins_by is not None
        place = bisect_left(self._ranked, held.entry) if len(self._ranked) > 1 else 0
        del self._ranked[place], self._tokens[place]
        del self._by_begin[bisect_left(self._by_begin, held.begins_by) if self._ranked else 0]
        held.entry = held.begins_by = None
        self._num_restricted -= held.is_restricted
        if place < self._last_considered:
            self._to_consider = None

    def tell_apart(self, least_capacity: int) -> None:
        """The smallest replica that takes requests has ``least_capacity`` blocks: larger requests are restricted."""
        if least_capacity == self._least_capacity:
            return
        self._least_capacity, self._to_consider = least_capacity, None
        for _, _, held in self._ranked:
            held.is_restricted = self._is_restricted(held)
        self._num_restricted = sum(held.is_restricted for _, _, held in self._ranked)

    def to_consider(self) -> list[Due]:
        """The most urgent requests in order, each with the due date that it is sent with. So that replicas keep this
        order, a date is moved up to the earliest one behind it; heavy tenants' requests keep their own, later ones. The
        same list object is returned until the order changes, unless there is only one request.
        """
        entries = self._entries
        if self._to_consider is not None:
            return self._to_consider
        if len(entries) == 1:
            held = entries[0][2]
            return [(held, self._due_there_s(held))]
        urgent = self._urgent()
        if self._shares.are_even:
            dues_s = list(accumulate([held.due_s for held in reversed(urgent)], min))[::-1]
            self._to_consider = list(zip(urgent, dues_s, strict=True))
            return self._to_consider
        there_s = [self._due_there_s(held) for held in urgent]
        before_others_s = list(accumulate(reversed(there_s), min))[::-1]
        yields = [self._shares.had_more(held.pending.tenant) for held in urgent]
        dues_s = [there_s[i] if yields[i] else before_others_s[i] for i in range(len(urgent))]
        self._to_consider = list(zip(urgent, dues_s, strict=True))
        return self._to_consider

    def up_to(self, held: Held, limit: int) -> tuple[list[Held], int]:
        """The last requests before it and itself, ``limit`` at most in all; and how many there are."""
        entries = self._entries
        assert held.entry is not None
        count = bisect_left(entries, held.entry) + 1
        return [other for _, _, other in entries[max(0, count - limit) : count]], count

    def before(self, held: Held, due_s: float) -> tuple[int, int]:
        """Prompt tokens of the requests that would go before this one if it were due at ``due_s``, and how many those
        are.
        """
        assert held.entry is not None
        entries = self._entries
        rank = (*self.rank(held)[:2], due_s)
        place = bisect_left(entries, (rank, held.entry[1]))
        is_among = held.entry[0] < rank  # it is due sooner, if only by a rounding
        return sum(self._tokens[:place]) - is_among * held.num_new_tokens, place - is_among

    def __iter__(self) -> Iterator[Held]:
        """In order."""
        return (held for _, _, held in self._entries)

    def __reversed__(self) -> Iterator[Held]:
        return (held for _, _, held in reversed(self._entries))

    def first(self, count: int) -> set[Held]:
        """The most urgent ``count`` requests."""
        return {held for _, _, held in self._entries[:count]}

    def that_begin_by(self, time_s: float) -> list[Held]:
        """The requests that have to begin at ``time_s`` or earlier."""
        return [held for _, _, held in self._by_begin[: bisect_left(self._by_begin, (time_s, self._num_put + 1))]]

    def rank(self, held: Held) -> Rank:
        """Its place in the order: lower goes first."""
        pending = held.pending
        return pending.priority, self._shares.place(pending.tenant), held.due_s

    def is_over(self, held: Held) -> bool:
        """Whether its tenant asks for more than its even share."""
        return self._shares.is_over(held.pending.tenant)

    @property
    def _entries(self) -> list[Entry]:
        """In order, sorted anew if tenants have changed places."""
        if self._shares_version != self._shares.version:
            self._rank_anew()
        return self._ranked

    def _urgent(self) -> list[Held]:
        """The requests that a look considers."""
        size = self._num_considered
        urgent = [held for _, _, held in self._ranked[:size]]
        num_more = sum(held.is_restricted for held in urgent) if self._num_restricted else 0
        if num_more:
            limits = {_limits(held) for held in urgent if held.is_restricted}
            num_others = num_free = num_more
            for _, _, held in islice(self._ranked, size, None):
                if not held.is_restricted and num_free:
                    num_free -= 1
                elif held.is_restricted and num_others and _limits(held) not in limits:
                    num_others -= 1
                else:
                    continue
                urgent.append(held)
                if not (num_free or num_others):
                    break
        self._last_considered = math.inf if num_more else size
        return urgent

    def _is_restricted(self, held: Held) -> bool:
        """Whether some replica may not take it: it is too large for one, or must not go to one."""
        query = held.pending.query
        return query.is_restricted or query.num_blocks_needed > self._least_capacity

    def _due_there_s(self, held: Held) -> float:
        """When it is due at the replica."""
        return held.due_s + self._later_s if self._shares.had_more(held.pending.tenant) else held.due_s

    def _rank_anew(self) -> None:
        """The places of tenants have changed: sort again. Most entries stay as they are, so that takes little time."""
        self._shares_version, self._to_consider = self._shares.version, None
        ranked: list[Entry] = []
        for entry in self._ranked:
            rank, number, held = entry
            if rank[1] != self._shares.place(held.pending.tenant):
                entry = held.entry = (self.rank(held), number, held)
            ranked.append(entry)
        self._sort(ranked)

    def _sort(self, ranked: list[Entry]) -> None:
        self._ranked = sorted(ranked)
        self._tokens = [held.num_new_tokens for _, _, held in self._ranked]


def _limits(held: Held) -> tuple[Phase, frozenset[str]]:
    """Which replicas must not take it, apart from its size."""
    query = held.pending.query
    return query.phase, query.excluded
