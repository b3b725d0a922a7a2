"""Cached blocks by what they follow and hold: who leaves a cached prefix within a block copies what it shares of it."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal_replica.prefix_cache import BlockHash, root_hash

TOKEN_BYTES = 4
WORTH_A_COPY = 4  # a quarter of a block is: fewer tokens are sooner computed than a whole block is copied


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence's tokens, and the salt that keeps them apart from others'."""

    token_ids: Sequence[int]
    salt: str

    def words(self, first: int, last: int) -> bytes:
        """Tokens ``[first, last)``, big-endian: such strings are in the order of their tokens."""
        words = array("I", self.token_ids[first:last])
        if sys.byteorder == "little":
            words.byteswap()
        return words.tobytes()

    def hash_before(self, block_hashes: Sequence[BlockHash], index: int) -> BlockHash:
        """Of all before block ``index``."""
        return block_hashes[index - 1] if index else root_hash(self.salt)


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A cached block of which the first ``num_tokens`` tokens are another sequence's next ones, too."""

    block_id: int
    num_tokens: int


class PartialReuse:
    """Which cached blocks follow each prefix, in the order of their tokens: those next to a prompt's place among them
    have most in common with it.

    TensorRT-LLM reuses blocks in part, by a copy, likewise (its ``enable_partial_reuse``).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._followers: dict[BlockHash, list[tuple[bytes, int]]] = {}  # by what goes before: words, block id; sorted
        self._held: dict[int, tuple[BlockHash, bytes]] = {}  # by block id

    def __len__(self) -> int:
        return len(self._held)

    def insert(self, block_id: int, before: BlockHash, words: bytes) -> None:
        """``block_id`` holds the tokens ``words`` after the prefix ``before``, and nothing else until ``evict``."""
        insort(self._followers.setdefault(before, []), (words, block_id))
        self._held[block_id] = (before, words)

    def evict(self, block_id: int) -> None:
        """What ``block_id`` holds is lost. Unknown ids are ignored."""
        before, words = self._held.pop(block_id, (None, b""))
        if before is None:
            return
        followers = self._followers[before]
        del followers[bisect_left(followers, (words, block_id))]
        if not followers:
            del self._followers[before]

    def find(self, before: BlockHash, words: bytes) -> PartialBlock | None:
        """The block after ``before`` that begins with most of ``words``; None where that is not worth a copy."""
        followers = self._followers.get(before)
        if not followers:
            return None
        place = bisect_left(followers, (words, -1))
        near = followers[max(0, place - 1) : place + 1]
        num_common, block_id = max((_num_common(held, words), block_id) for held, block_id in near)
        return PartialBlock(block_id, num_common) if num_common * WORTH_A_COPY >= self._block_size else None

    def check_invariants(self) -> None:
        """Both maps tell the same."""
        assert dict(self._told()) == self._held
        assert all(one < other for followers in self._followers.values() for one, other in pairwise(followers))

    def _told(self) -> Iterator[tuple[int, tuple[BlockHash, bytes]]]:
        for before, followers in self._followers.items():
            assert followers
            yield from ((block_id, (before, words)) for words, block_id in followers)


def _num_common(left: bytes, right: bytes) -> int:
    """How many tokens both begin with."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (8 * size - differing.bit_length()) // (8 * TOKEN_BYTES)
