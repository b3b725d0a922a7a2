"""Block hashes, and the cache's events."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest

from shoal_replica.prefix_cache import BlockHash, PrefixCache, extend_block_hashes, hash_blocks

A, B, C = (BlockHash(bytes([n]) * 16) for n in (1, 2, 3))


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hash_blocks(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_every_token_before_it() -> None:
    one, other = hash_blocks([1, 2, 3, 4, 5, 6], 2), hash_blocks([1, 2, 9, 4, 5, 6], 2)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "equal tokens after unequal ones"


def test_block_size_and_salt_keep_hashes_apart() -> None:
    tokens = list(range(8))
    hashes = [hash_blocks(tokens, 4), hash_blocks(tokens, 8), hash_blocks(tokens, 4, "tenant")]
    assert len({block_hash for group in hashes for block_hash in group}) == 5


def test_an_adapter_keeps_hashes_apart_whatever_the_salt() -> None:
    hashes = [hash_blocks([1], 1, *salts)[0] for salts in (("",), ("a",), ("", "a"), ("a", "a"), ("", "b"), ("aa",))]
    assert len(set(hashes)) == 6
    assert hash_blocks([1, 2], 1, "s", "a")[:1] == hash_blocks([1], 1, "s", "a")


def test_any_string_is_a_salt() -> None:
    assert hash_blocks([1], 1, "\ud800") != hash_blocks([1], 1, "\ud801")


@pytest.mark.parametrize("cut", range(13))
def test_extending_is_hashing_the_whole(cut: int) -> None:
    tokens = list(range(100, 112))
    hashes = hash_blocks(tokens[:cut], 3, "salt")
    extend_block_hashes(hashes, tokens, 3, "salt")
    assert hashes == hash_blocks(tokens, 3, "salt")


def test_a_hash_is_what_every_process_and_machine_computes() -> None:
    """blake2b over the parent's digest and the tokens as little-endian uint32; the salt's is the first parent."""
    root = blake2b(b"salt", digest_size=16).digest()
    first = blake2b(root + struct.pack("<2I", 1, 2**32 - 1), digest_size=16).digest()
    second = blake2b(first + struct.pack("<2I", 0, 7), digest_size=16).digest()
    assert hash_blocks([1, 2**32 - 1, 0, 7, 9], 2, "salt") == [first, second]


def test_match_is_the_longest_prefix_without_a_hole() -> None:
    cache = PrefixCache()
    cache.insert(A, 7)
    cache.insert(C, 9)
    assert cache.match([A, B, C]) == [7]
    cache.insert(B, 8)
    assert cache.match([A, B, C]) == [7, 8, 9]
    assert cache.match([]) == []


def test_one_hash_has_one_block_and_one_block_one_hash() -> None:
    cache = PrefixCache()
    assert cache.insert(A, 1)
    assert not cache.insert(A, 2)
    assert not cache.insert(B, 1)
    assert not cache.holds(2)
    assert cache.take_events() == ([A], [])
    cache.check_invariants()


def test_evicting_what_holds_nothing_is_nothing() -> None:
    cache = PrefixCache()
    cache.evict(3)
    assert cache.take_events() == ([], [])


def test_events_are_net() -> None:
    cache = PrefixCache()
    cache.insert(A, 1)
    cache.evict(1)
    assert cache.take_events() == ([], []), "came and went"
    cache.insert(A, 1)
    cache.insert(B, 2)
    assert cache.take_events() == ([A, B], [])
    cache.evict(1)
    cache.insert(A, 5)
    assert cache.take_events() == ([], []), "went and came back, in another block"
    cache.evict(5)
    cache.insert(A, 5)
    cache.evict(5)
    assert cache.take_events() == ([], [A])
    assert cache.take_events() == ([], []), "taken once"
    assert list(cache.hashes()) == [B]
