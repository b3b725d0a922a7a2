"""What has changed of the replicas since somebody asked last, as far as it changes decisions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal_replica.prefix_cache import BlockHash


class News:
    """Places of members of which there are news. That they are alive is none, nor are blocks that nobody watches."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self._rematched: set[int] = set()
        self._block_hashes: Sequence[BlockHash] = ()
        self._watched: frozenset[BlockHash] = frozenset()

    def watch(self, block_hashes: Sequence[BlockHash]) -> None:
        """From now on it is known where more or less of a prompt may be cached."""
        self._rematched.clear()
        if block_hashes is not self._block_hashes:
            self._block_hashes, self._watched = block_hashes, frozenset(block_hashes)

    def note(self, place: int) -> None:
        """What is told of the replica there, or promised to it, has changed."""
        self._changed.add(place)

    def note_all(self, place: int) -> None:
        """All that it caches may be other blocks."""
        self._changed.add(place)
        self._rematched.add(place)

    def note_blocks(self, place: int, *block_hashes: Collection[BlockHash]) -> None:
        """These are cached or expected there, or no longer."""
        watched = self._watched
        if watched and not all(map(watched.isdisjoint, block_hashes)):
            self.note_all(place)

    def take(self) -> tuple[set[int], set[int]]:
        """Where there are news since this was asked last; of these, where more or less of the watched blocks may be."""
        changed, rematched = self._changed, self._rematched
        self._changed, self._rematched = set(), set()
        return changed, rematched
