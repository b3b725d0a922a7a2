"""What has changed of the replicas since somebody asked last, as far as it changes decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_replica.prefix_cache import BlockHash


class News:
    """Places of members of which there are news. That they are alive is none, nor are blocks that make no difference to
    the prompt that is watched.

    Attributes:
        changed: where there are, since they were taken last.
        rematched: of these, where more or less of the watched prompt may be.
    """

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self.rematched: set[int] = set()
        self._block_hashes: Sequence[BlockHash] = ()
        self._watched: frozenset[BlockHash] = frozenset()
        self._matched: Ints = np.zeros(0, np.int64)

    def watch(self, block_hashes: Sequence[BlockHash], matched: Ints) -> None:
        """From now on it is known where more or less of a prompt may be cached than the leading blocks that are now,
        ``matched`` [n].
        """
        self.rematched.clear()
        self._matched = matched
        if block_hashes is not self._block_hashes:
            self._block_hashes, self._watched = block_hashes, frozenset(block_hashes)

    def note(self, place: int) -> None:
        """What is told of the replica there, or promised to it, has changed."""
        self.changed.add(place)

    def note_all(self, place: int) -> None:
        """All that it caches may be other blocks."""
        self.changed.add(place)
        self.rematched.add(place)

    def note_more(self, place: int, block_hashes: Collection[BlockHash]) -> None:
        """These are cached or expected there. Only the first one that was missing makes more of a prompt."""
        if self._watched and not self._watched.isdisjoint(block_hashes):
            count = self._matched.item(place)
            if self._block_hashes[count : count + 1] and self._block_hashes[count] in block_hashes:
                self.note_all(place)

    def note_less(self, place: int, block_hashes: Collection[BlockHash], is_there: Callable[[BlockHash], bool]) -> None:
        """These are cached or expected there no longer, but for those that ``is_there`` still knows."""
        if self._watched and not self._watched.isdisjoint(block_hashes):
            known = set(self._block_hashes[: self._matched.item(place)])
            if any(block_hash in known and not is_there(block_hash) for block_hash in block_hashes):
                self.note_all(place)

    def take(self) -> tuple[set[int], set[int]]:
        """``changed`` and ``rematched``, which begin anew."""
        changed, rematched = self.changed, self.rematched
        self.changed, self.rematched = set(), set()
        return changed, rematched
