"""Which held requests find the same blocks cached: they share what it costs to compute them on one more replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY
from shoal_cluster.policies.held import NOT_MATCHED, Held, KnownEnd
from shoal_cluster.policies.ranking import is_eligible

Shared = tuple[int, int, int]
"""``RouteQuery.num_known_blocks``, ``num_alike`` and ``num_holders``."""
ALONE: Shared = (0, 1, 0)

MIN_ALIKE = 4  # fewer share nothing: where one replica has the blocks, another one would serve half of them


@dataclass(slots=True)
class Group:
    """Held requests whose longest cached prefix is the same.

    Attributes:
        num_known_blocks: blocks of that prefix.
        num_holders: eligible replicas that cache all of it, as last looked up for any of the requests (once there are
            MIN_ALIKE), plus one for each request since sent to a replica that did not cache it.
        shared: what is said of each request. Their number is rounded down to a power of two, so that plans which go by
            it stand; they share nothing where they are so few that one more replica would not serve two.
    """

    num_known_blocks: int
    num_waiting: int = 0
    num_holders: int = 0
    shared: Shared = ALONE

    def share(self) -> None:
        """Bring ``shared`` up to date."""
        rounded = 1 << self.num_waiting.bit_length() >> 1
        is_many = rounded >= max(MIN_ALIKE, self.num_holders + 2)
        self.shared = (self.num_known_blocks, rounded, self.num_holders) if is_many else ALONE


class Alike:
    """Groups held requests by their longest cached prefix: two are in one group if the longest prefix that some
    eligible replica caches ends with the same block for both.

    Attributes:
        version: while it is the same, ``of`` says the same of each, except of one that is noted in between.
    """

    def __init__(self) -> None:
        self._groups: dict[KnownEnd, Group] = {}
        self.version = 0

    def note(self, held: Held, present: Candidates) -> None:
        """What is cached of its prompt on the replicas ``present`` has been looked up."""
        if held.matched is held.noted:
            return
        held.noted = matched = held.matched
        query, place = held.pending.query, int(matched.argmax()) if matched.size else -1
        known = matched.item(place) if matched.size else 0
        if known and (query.is_restricted or present.columns.item(CAPACITY, place) < query.num_blocks_needed):
            matched = np.where(is_eligible(query, present), matched, 0)
            known = matched.item(matched.argmax())
        held.num_known_blocks = known
        end = (query.block_hashes[known - 1], query.phase) if known else None
        if end != held.known_end:
            self._change(held.known_end, num_waiting=-1)
            if end is not None:
                self._groups.setdefault(end, Group(known))
            self._change(end, num_waiting=1)
            held.known_end = end
        if end is not None and self._groups[end].num_waiting >= MIN_ALIKE:
            num_holders = int(np.count_nonzero((matched == known) & is_eligible(query, present)))
            self._change(end, num_holders=num_holders - self._groups[end].num_holders)

    def send(self, held: Held, num_matched_blocks: int) -> None:
        """It goes to a replica that has so many of its blocks, and will have the others soon."""
        end, is_copied = held.known_end, num_matched_blocks < held.num_known_blocks
        self.drop(held)
        if is_copied and end in self._groups:
            self._change(end, num_holders=1)

    def drop(self, held: Held) -> None:
        """It no longer waits."""
        self._change(held.known_end, num_waiting=-1)
        held.noted, held.known_end = NOT_MATCHED, None

    def of(self, held: Held) -> Shared:
        """What ``RouteQuery`` says of it."""
        if held.known_end is None:
            return ALONE
        return self._groups[held.known_end].shared

    def _change(self, end: KnownEnd | None, num_waiting: int = 0, num_holders: int = 0) -> None:
        if end is None or not (num_waiting or num_holders):
            return
        group, before = self._groups[end], self._groups[end].shared
        group.num_waiting += num_waiting
        group.num_holders += num_holders
        group.share()
        self.version += group.shared != before
        if not group.num_waiting:
            del self._groups[end]
