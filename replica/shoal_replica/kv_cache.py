"""Block tables of the running sequences, over one pool and one prefix cache (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_replica.block_pool import BlockPool
from shoal_replica.config import CacheConfig
from shoal_replica.prefix_cache import BlockHash, PrefixCache

BlockTable = list[int]


@dataclass(frozen=True, slots=True)
class TableChange:
    """What ``append`` did to a block table: ``block_ids`` stand from ``first_index`` on; ``copies`` come before use."""

    first_index: int
    block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()


class KVCacheManager:
    """Allocates, appends, forks (copy-on-write) and frees block tables. Questions never change anything."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(config.num_blocks, self.prefix_cache.holds, self.prefix_cache.evict)
        self.is_caching = config.enable_prefix_caching
        self._tables: dict[int, BlockTable] = {}
        self._num_committed: dict[int, int] = {}

    # Questions

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def match(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[int]:
        """Cached blocks a sequence of ``num_tokens`` may reuse; its last token is always computed anew."""
        if not self.is_caching:
            return []
        return self.prefix_cache.match(block_hashes[: (num_tokens - 1) // self.block_size])

    def can_allocate(self, matched_block_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens fit when ``matched_block_ids`` are reused."""
        num_new = self.num_blocks_for(num_tokens) - len(matched_block_ids)
        num_reclaimed = sum(1 for b in matched_block_ids if self.pool.num_refs(b) == 0)
        return num_new + num_reclaimed <= self.pool.num_free

    def fits_last_block(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether the tokens between go to the last block of the table, and it is this sequence's alone: ``append``
        would change nothing. So it is for most decodes, and cheaper to ask.
        """
        table = self._tables[seq_id]
        end = len(table) * self.block_size
        return (
            end - self.block_size <= num_computed_tokens
            and num_tokens <= end
            and self.pool.num_refs(table[-1]) == 1
            and not self.prefix_cache.holds(table[-1])
        )

    def num_blocks_to_append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Free blocks that ``append`` with the same arguments would take."""
        table = self._tables[seq_id]
        return max(0, self.num_blocks_for(num_tokens) - len(table)) + len(
            self._read_by_others(table, num_computed_tokens, num_tokens)
        )

    def reads_shared(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether ``append`` with the same arguments would copy a block."""
        return bool(self._read_by_others(self._tables[seq_id], num_computed_tokens, num_tokens))

    def block_table(self, seq_id: int) -> BlockTable:
        return self._tables[seq_id]

    # Commands

    def allocate(self, seq_id: int, matched_block_ids: Sequence[int], num_tokens: int) -> BlockTable:
        """Give a sequence its first block table: the matched blocks, then fresh ones up to ``num_tokens`` tokens."""
        if seq_id in self._tables:
            raise RuntimeError(f"sequence {seq_id} already has a block table")
        self.pool.touch(matched_block_ids)
        num_new = self.num_blocks_for(num_tokens) - len(matched_block_ids)
        table = [*matched_block_ids, *self.pool.allocate(num_new)]
        self._tables[seq_id] = table
        self._num_committed[seq_id] = len(matched_block_ids)
        return table

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> TableChange | None:
        """Make tokens ``[num_computed_tokens, num_tokens)`` writable: grow the table, and copy what others read.

        Returns None when nothing had to change. The caller has made sure that there are enough free blocks.
        """
        table = self._tables[seq_id]
        shared = self._read_by_others(table, num_computed_tokens, num_tokens)
        num_grown = max(0, self.num_blocks_for(num_tokens) - len(table))
        if not shared and not num_grown:
            return None
        first_index = shared[0] if shared else len(table)
        copies = []
        for index in shared:
            old, (new,) = table[index], self.pool.allocate(1)
            table[index] = new
            copies.append((old, new))
            self.pool.free([old])
        table.extend(self.pool.allocate(num_grown))
        return TableChange(first_index, tuple(table[first_index:]), tuple(copies))

    def fork(self, parent_id: int, child_id: int) -> BlockTable:
        """Let a child share all of its parent's blocks; whoever writes a shared block first copies it."""
        if child_id in self._tables:
            raise RuntimeError(f"sequence {child_id} already has a block table")
        table = list(self._tables[parent_id])
        self.pool.touch(table)
        self._tables[child_id] = table
        self._num_committed[child_id] = self._num_committed[parent_id]
        return table

    def commit(self, seq_id: int, block_hashes: Sequence[BlockHash], num_computed_tokens: int) -> None:
        """Enter the blocks that ``num_computed_tokens`` have filled into the prefix cache."""
        if not self.is_caching:
            return
        first, last = self._num_committed[seq_id], num_computed_tokens // self.block_size
        table = self._tables[seq_id]
        for index in range(first, last):
            self.prefix_cache.insert(block_hashes[index], table[index])
        self._num_committed[seq_id] = max(first, last)

    def free(self, seq_id: int) -> None:
        """Give up a sequence's blocks. What they hold stays reusable until they are evicted."""
        self.pool.free(self._tables.pop(seq_id))
        del self._num_committed[seq_id]

    def check_invariants(self) -> None:
        """Reference counts are exactly the tables' uses of each block."""
        self.pool.check_invariants()
        self.prefix_cache.check_invariants()
        uses = Counter(b for table in self._tables.values() for b in table)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_refs(block_id) == uses[block_id], (block_id, uses[block_id])
        assert self._tables.keys() == self._num_committed.keys()

    def _read_by_others(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """Indices of the blocks of the tokens between that are not this sequence's alone: another one uses them, or
        they hold a cached prefix, which any may come to use.
        """
        first, last = num_computed_tokens // self.block_size, min(len(table), self.num_blocks_for(num_tokens))
        pool, cache = self.pool, self.prefix_cache
        return [i for i in range(first, last) if pool.num_refs(table[i]) > 1 or cache.holds(table[i])]
