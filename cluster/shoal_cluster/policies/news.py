"""What has changed about the replicas since it was last asked for, as far as it can change decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_replica.prefix_cache import BlockHash


class News:
    """The places of members with news. A mere sign of life is no news, nor are blocks that make no difference to the
    watched prompt.

    Attributes:
        changed: places with news since the last ``take``.
        rematched: those of them where more or less of the watched prompt may be cached.
    """

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self.rematched: set[int] = set()
        self._block_hashes: Sequence[BlockHash] = ()
        self._watched: frozenset[BlockHash] = frozenset()
        self._matched: Ints = np.zeros(0, np.int64)

    def watch(self, block_hashes: Sequence[BlockHash], matched: Ints) -> None:
        """Watch a prompt, of which ``matched`` [n] leading blocks are cached on each replica now: ``rematched`` tells
        from now on where more or less of it may be.
        """
        self.rematched.clear()
        self._matched = matched
        if block_hashes is not self._block_hashes:
            self._block_hashes, self._watched = block_hashes, frozenset(block_hashes)

    def note(self, place: int) -> None:
        """What the replica at ``place`` has told, or what is promised to it, has changed."""
        self.changed.add(place)

    def note_all(self, place: int) -> None:
        """All blocks that the replica caches may have changed."""
        self.changed.add(place)
        self.rematched.add(place)

    def note_more(self, place: int, block_hashes: Collection[BlockHash]) -> None:
        """These blocks are now cached or expected there. Only the first missing one makes a match longer."""
        if self._watched and not self._watched.isdisjoint(block_hashes):
            count = self._matched.item(place)
            if self._block_hashes[count : count + 1] and self._block_hashes[count] in block_hashes:
                self.note_all(place)

    def note_less(self, place: int, block_hashes: Collection[BlockHash], is_there: Callable[[BlockHash], bool]) -> None:
        """These blocks are no longer cached or expected there, except those that ``is_there`` still knows."""
        if self._watched and not self._watched.isdisjoint(block_hashes):
            known = set(self._block_hashes[: self._matched.item(place)])
            if any(block_hash in known and not is_there(block_hash) for block_hash in block_hashes):
                self.note_all(place)

    def take(self) -> tuple[set[int], set[int]]:
        """Return ``changed`` and ``rematched``, and start anew."""
        changed, rematched = self.changed, self.rematched
        self.changed, self.rematched = set(), set()
        return changed, rematched
