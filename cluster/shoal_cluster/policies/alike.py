"""Which held requests find the same blocks cached: they share what it costs to compute them on one more replica."""

from __future__ import annotations

from collections import Counter

import numpy as np

from shoal_cluster.policies.held import UNKNOWN, Held
from shoal_replica.prefix_cache import BlockHash

Shared = tuple[int, int, int]
"""``RouteQuery.num_known_blocks``, ``num_alike`` and ``num_holders``."""
ALONE: Shared = (0, 1, 0)


class Alike:
    """Counts held requests by the last of the leading blocks that some replica caches of each.

    Attributes:
        num_changes: while it is the same, ``of`` says the same of each, except of one that is noted in between.
    """

    def __init__(self) -> None:
        self._counts = Counter[BlockHash]()
        self.num_changes = 0

    def note(self, held: Held) -> None:
        """What is cached of its prompt has been looked up."""
        if held.matched is held.noted:
            return
        held.noted = held.matched
        held.num_known_blocks = int(held.matched.max(initial=0))
        held.num_holders = int(np.count_nonzero(held.matched == held.num_known_blocks))
        end = held.pending.query.block_hashes[held.num_known_blocks - 1] if held.num_known_blocks else None
        if end != held.known_end:
            self._count(held.known_end, -1)
            self._count(end, +1)
            held.known_end = end

    def drop(self, held: Held) -> None:
        """It no longer waits."""
        self._count(held.known_end, -1)
        held.noted, held.known_end = UNKNOWN, None

    def of(self, held: Held) -> Shared:
        """What ``RouteQuery`` says of it: the number alike is a power of two, so that it changes seldom."""
        if held.known_end is None:
            return ALONE
        num_alike = 1 << (self._counts[held.known_end].bit_length() - 1)
        if num_alike <= held.num_holders + 1:  # one more replica would serve it alone
            return ALONE
        return held.num_known_blocks, num_alike, held.num_holders

    def _count(self, end: BlockHash | None, change: int) -> None:
        if end is None:
            return
        before, now = self._counts[end], self._counts[end] + change
        self._counts[end] = now
        self.num_changes += before.bit_length() != now.bit_length()  # the power of two is another one
        if not now:
            del self._counts[end]
