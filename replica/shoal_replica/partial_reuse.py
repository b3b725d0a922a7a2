"""Partial reuse of cached blocks: a prompt that diverges from a cached prefix within a block copies the shared part."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal_replica.prefix_cache import BlockHash, root_hash

TOKEN_BYTES = 4
WORTH_A_COPY = 4  # a quarter of a block is: computing fewer tokens takes less time than copying a whole block


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence's tokens, and what separates them from others' in the cache, as in ``root_hash``."""

    token_ids: Sequence[int]
    salt: str
    adapter: str = ""

    def words(self, first: int, last: int) -> bytes:
        """Tokens ``[first, last)``, big-endian, so that byte strings compare in the order of their tokens."""
        words = array("I", self.token_ids[first:last])
        if sys.byteorder == "little":
            words.byteswap()
        return words.tobytes()

    def hash_before(self, block_hashes: Sequence[BlockHash], index: int) -> BlockHash:
        """The hash of all tokens before block ``index``."""
        return block_hashes[index - 1] if index else root_hash(self.salt, self.adapter)


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A cached block whose first ``num_tokens`` tokens are also another sequence's next ones."""

    block_id: int
    num_tokens: int


class PartialReuse:
    """The cached blocks that follow each prefix, sorted by their tokens: the neighbours of a prompt's place in that
    order have the most leading tokens in common with it.

    TensorRT-LLM reuses blocks in part, by a copy, in the same way (its ``enable_partial_reuse``).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._followers: dict[BlockHash, list[tuple[bytes, int]]] = {}  # by prefix hash: (words, block id), sorted
        self._held: dict[int, tuple[BlockHash, bytes]] = {}  # by block id

    def __len__(self) -> int:
        return len(self._held)

    def insert(self, block_id: int, before: BlockHash, words: bytes) -> None:
        """``block_id`` holds the tokens ``words`` after the prefix ``before``, and nothing else until ``evict``."""
        insort(self._followers.setdefault(before, []), (words, block_id))
        self._held[block_id] = (before, words)

    def evict(self, block_id: int) -> None:
        """The content of ``block_id`` is lost. Unknown ids are ignored."""
        before, words = self._held.pop(block_id, (None, b""))
        if before is None:
            return
        followers = self._followers[before]
        del followers[bisect_left(followers, (words, block_id))]
        if not followers:
            del self._followers[before]

    def find(self, before: BlockHash, words: bytes) -> PartialBlock | None:
        """The block after ``before`` with the most leading tokens of ``words``; None if too few to be worth a copy."""
        followers = self._followers.get(before)
        if not followers:
            return None
        place = bisect_left(followers, (words, -1))
        near = followers[max(0, place - 1) : place + 1]
        num_common, block_id = max((_num_common(held, words), block_id) for held, block_id in near)
        return PartialBlock(block_id, num_common) if num_common * WORTH_A_COPY >= self._block_size else None

    def check_invariants(self) -> None:
        """Both maps hold the same blocks, and followers are sorted."""
        assert dict(self._told()) == self._held
        assert all(one < other for followers in self._followers.values() for one, other in pairwise(followers))

    def _told(self) -> Iterator[tuple[int, tuple[BlockHash, bytes]]]:
        for before, followers in self._followers.items():
            assert followers
            yield from ((block_id, (before, words)) for words, block_id in followers)


def _num_common(left: bytes, right: bytes) -> int:
    """The number of leading tokens that both have in common."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (8 * size - differing.bit_length()) // (8 * TOKEN_BYTES)
