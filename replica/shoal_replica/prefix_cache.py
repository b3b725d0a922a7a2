"""Chained block hashes, and the map from a hash to the block that holds its KV."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

DIGEST_BYTES = 16


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[BlockHash]:
    """Hash every full block of ``token_ids``; each hash also covers all tokens before its block.

    Hashes are equal in every process (blake2b over little-endian uint32), so that routers and replicas agree. ``salt``
    separates the caches of tenants, ``adapter`` those of adapters, whose keys and values differ.
    """
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size, salt, adapter)
    return hashes


def extend_block_hashes(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = ""
) -> None:
    """Append to ``hashes`` the hashes of the full blocks it does not cover yet."""
    first, last = len(hashes), len(token_ids) // block_size
    if first >= last:
        return
    parent: bytes = hashes[-1] if hashes else root_hash(salt, adapter)
    words = array("I", token_ids[first * block_size : last * block_size])
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    stride = block_size * words.itemsize
    for start in range(0, len(data), stride):
        parent = blake2b(parent + data[start : start + stride], digest_size=DIGEST_BYTES).digest()
        hashes.append(BlockHash(parent))


def root_hash(salt: str, adapter: str = "") -> BlockHash:
    """The hash from which the first block's hash is chained. An adapter's name is the key of its hash, so that no salt,
    which clients choose, can be taken for it.
    """
    key = blake2b(adapter.encode()).digest() if adapter else b""
    return BlockHash(blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES, key=key).digest())


class PrefixCache:
    """Which blocks hold which prefix. Knows nothing about reference counts or eviction order.

    Changes are also recorded as events (hashes stored, hashes removed) for mirrors of the cache, such as routers. Host
    memory may keep a hash that has no block here; for mirrors it stays cached.
    """

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    def hashes(self) -> Iterable[BlockHash]:
        """Every cached hash, oldest insertion first."""
        return self._block_of.keys()

    def match(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Block ids of the longest cached prefix of ``block_hashes``."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def block_of(self, block_hash: BlockHash) -> int | None:
        """The block that holds ``block_hash``."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash:
        """The hash of the prefix that ``block_id`` holds; it must hold one."""
        return self._hash_of[block_id]

    def insert(self, block_hash: BlockHash, block_id: int, on_host: bool = False) -> bool:
        """Record that ``block_id`` holds ``block_hash``. False if a block already holds it, or ``block_id`` holds one.

        ``on_host``, here and in ``evict``: whether host memory holds the hash as well.
        """
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        if not on_host and self._removed.pop(block_hash, self) is self:
            self._stored[block_hash] = None
        return True

    def evict(self, block_id: int, on_host: bool = False) -> None:
        """Forget what ``block_id`` holds, if anything."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        if not on_host:
            self._note_removed(block_hash)

    def note_forgotten(self, block_hash: BlockHash) -> None:
        """Host memory no longer holds ``block_hash``."""
        if block_hash not in self._block_of:
            self._note_removed(block_hash)

    def holds(self, block_id: int) -> bool:
        """Whether ``block_id`` holds a cached prefix."""
        return block_id in self._hash_of

    def take_events(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """The hashes stored and removed since the last call, as net changes."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def check_invariants(self) -> None:
        """The two maps are each other's inverse."""
        assert len(self._block_of) == len(self._hash_of)
        for block_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == block_hash

    def _note_removed(self, block_hash: BlockHash) -> None:
        if self._stored.pop(block_hash, self) is self:
            self._removed[block_hash] = None
