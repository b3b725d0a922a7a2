"""Block tables of the running sequences, over one pool and one prefix cache (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from shoal_replica.block_pool import BlockPool
from shoal_replica.config import CacheConfig
from shoal_replica.host_blocks import HostBlocks
from shoal_replica.partial_reuse import PartialBlock, PartialReuse, Tokens
from shoal_replica.prefix_cache import BlockHash, PrefixCache

BlockTable = list[int]
Cached = int | BlockHash
"""A cached block: its id, or its hash if only host memory holds it."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """What ``append`` did to a block table: from ``first_index`` on it holds ``block_ids``. Before these are used,
    ``copies`` (source, destination) must be made.
    """

    first_index: int
    block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()


class KVCacheManager:
    """Allocates, appends, forks (copy-on-write) and frees block tables. Queries never change anything."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.prefix_cache = PrefixCache()
        self.host = HostBlocks(config.num_host_blocks, self.prefix_cache.note_forgotten)
        self.pool = BlockPool(config.num_blocks, self.prefix_cache.holds, self._evict)
        self.is_caching = config.enable_prefix_caching
        self._partial = PartialReuse(config.block_size)
        self._reuses_partially = config.enable_prefix_caching and config.enable_partial_reuse
        self._tables: dict[int, BlockTable] = {}
        self._num_committed: dict[int, int] = {}
        self.guest_ids = count(-1, -1)  # see ``GuestTable``

    # Queries

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def match(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[Cached]:
        """Cached blocks that a sequence of ``num_tokens`` may reuse; its last token is always computed anew."""
        if not self.is_caching:
            return []
        wanted = block_hashes[: (num_tokens - 1) // self.block_size]
        found: list[Cached] = [*self.prefix_cache.match(wanted)]
        if len(self.host):
            for block_hash in wanted[len(found) :]:
                block_id = self.prefix_cache.block_of(block_hash)
                if block_id is None and block_hash not in self.host:
                    break
                found.append(block_hash if block_id is None else block_id)
        return found

    def num_missing(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many blocks of a prefix to take over from another replica: those after the ones on the device. 0 if host
        memory holds the next one, as to bring that back is cheaper.
        """
        left = block_hashes[len(self.prefix_cache.match(block_hashes)) :]
        return 0 if left and left[0] in self.host else len(left)

    def match_within(
        self, block_hashes: Sequence[BlockHash], num_matched: int, tokens: Tokens | None
    ) -> PartialBlock | None:
        """For a sequence of which ``match`` found ``num_matched`` blocks: the cached block that shares the most leading
        tokens with its next block, if they are worth a copy. The block's content stays valid until the next step
        computes, even if the block is given out.
        """
        if tokens is None or not len(self._partial):
            return None
        start = num_matched * self.block_size
        words = tokens.words(start, min(start + self.block_size, len(tokens.token_ids) - 1))
        return self._partial.find(tokens.hash_before(block_hashes, num_matched), words)

    def uncached(self, block_hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """The full blocks of a prompt that are not cached yet and will be once it has been computed."""
        if not self.is_caching:
            return ()
        return block_hashes[len(self.match(block_hashes, len(block_hashes) * self.block_size + 1)) :]

    def can_allocate(self, matched: Sequence[Cached], num_tokens: int, num_kept: int = 0) -> bool:
        """Whether ``num_tokens`` tokens fit if ``matched`` is reused and ``num_kept`` free blocks stay reserved."""
        num_held = sum(1 for block in matched if isinstance(block, int) and self.pool.num_refs(block))
        return self.num_blocks_for(num_tokens) - num_held <= self.pool.num_free - num_kept

    def cached_hashes(self) -> Iterable[BlockHash]:
        """Every cached block hash, on the device or on the host."""
        yield from self.prefix_cache.hashes()
        yield from (block_hash for block_hash in self.host.hashes() if block_hash not in self.prefix_cache)

    def fits_last_block(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether tokens ``[num_computed_tokens, num_tokens)`` go to the last block of the table and no other sequence
        can read it, so that ``append`` would change nothing. A cheap check that is true for most decodes.
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

    def num_blocks_to_append_to_all(self, seq_ids: Sequence[int], num_computed_tokens: int, num_tokens: int) -> int:
        """Free blocks that ``append`` would take for all of the sequences, one after another: the last of those that
        share a block only with each other need not copy it.
        """
        tables = [self._tables[seq_id] for seq_id in seq_ids]
        num_grown = sum(max(0, self.num_blocks_for(num_tokens) - len(table)) for table in tables)
        shared = Counter(t[i] for t in tables for i in self._read_by_others(t, num_computed_tokens, num_tokens))
        num_kept = sum(
            self.pool.num_refs(block) == count and not self.prefix_cache.holds(block) for block, count in shared.items()
        )
        return num_grown + shared.total() - num_kept

    def reads_shared(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether ``append`` with the same arguments would copy a block."""
        return bool(self._read_by_others(self._tables[seq_id], num_computed_tokens, num_tokens))

    def block_table(self, seq_id: int) -> BlockTable:
        return self._tables[seq_id]

    @property
    def num_tables(self) -> int:
        """How many sequences have blocks."""
        return len(self._tables)

    @property
    def has_guests(self) -> bool:
        """Whether there are tables with negative ids: blocks on their way from or to another replica."""
        return any(seq_id < 0 for seq_id in self._tables)

    # Commands

    def refresh(self, block_id: int) -> None:
        """Mark a cached block as used without giving it to a sequence: of the free blocks it is evicted last."""
        self.pool.touch([block_id])
        self.pool.free([block_id])

    def allocate(self, seq_id: int, matched: Sequence[Cached], num_tokens: int) -> BlockTable:
        """Give a sequence its first block table: the matched blocks, then fresh ones up to ``num_tokens`` tokens.

        A match that only the host holds gets a fresh block, into which the next step copies it.
        """
        if seq_id in self._tables:
            raise RuntimeError(f"sequence {seq_id} already has a block table")
        on_device = [block for block in matched if isinstance(block, int)]
        self.pool.touch(on_device)
        self.host.hold(block for block in matched if not isinstance(block, int))
        fresh = iter(self.pool.allocate(self.num_blocks_for(num_tokens) - len(on_device)))
        table = [block if isinstance(block, int) else self._bring(block, next(fresh)) for block in matched]
        table.extend(fresh)
        self._tables[seq_id] = table
        self._num_committed[seq_id] = len(matched)
        return table

    def append(self, seq_id: int, num_computed_tokens: int, num_tokens: int) -> TableChange | None:
        """Make tokens ``[num_computed_tokens, num_tokens)`` writable: grow the table, and copy blocks that others read.

        Returns None if nothing had to change. The caller makes sure that there are enough free blocks.
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
        """Let a child share all of its parent's blocks; the first of them to write a shared block copies it."""
        if child_id in self._tables:
            raise RuntimeError(f"sequence {child_id} already has a block table")
        table = list(self._tables[parent_id])
        self.pool.touch(table)
        self._tables[child_id] = table
        self._num_committed[child_id] = self._num_committed[parent_id]
        return table

    def commit(
        self, seq_id: int, block_hashes: Sequence[BlockHash], num_computed_tokens: int, tokens: Tokens | None = None
    ) -> None:
        """Enter the blocks that the first ``num_computed_tokens`` fill, as far as they have hashes, into the prefix
        cache. If ``tokens`` of the sequence are given, the blocks may also be reused in part.
        """
        if not self.is_caching:
            return
        first = self._num_committed[seq_id]
        last = min(len(block_hashes), num_computed_tokens // self.block_size)
        table = self._tables[seq_id]
        for index in range(first, last):
            is_new = self.prefix_cache.insert(block_hashes[index], table[index], block_hashes[index] in self.host)
            if is_new and self._reuses_partially and tokens is not None:
                words = tokens.words(index * self.block_size, (index + 1) * self.block_size)
                self._partial.insert(table[index], tokens.hash_before(block_hashes, index), words)
        self._num_committed[seq_id] = max(first, last)

    def free(self, seq_id: int) -> None:
        """Release a sequence's blocks. Cached content stays reusable until it is evicted."""
        self.pool.free(self._tables.pop(seq_id))
        del self._num_committed[seq_id]

    def check_invariants(self) -> None:
        """Each block's reference count equals the number of its uses in the block tables."""
        self.pool.check_invariants()
        self.prefix_cache.check_invariants()
        self._partial.check_invariants()
        self.host.check_invariants()
        uses = Counter(b for table in self._tables.values() for b in table)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_refs(block_id) == uses[block_id], (block_id, uses[block_id])
        assert self._tables.keys() == self._num_committed.keys()

    def _evict(self, block_id: int) -> None:
        """A block that holds a prefix is being given out: host memory keeps its content if it can."""
        on_host = self.host.keep(self.prefix_cache.hash_of(block_id), block_id)
        self.prefix_cache.evict(block_id, on_host)
        self._partial.evict(block_id)

    def _bring(self, block_hash: BlockHash, block_id: int) -> int:
        self.host.bring(block_hash, block_id)
        self.prefix_cache.insert(block_hash, block_id, on_host=True)
        return block_id

    def _read_by_others(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """Indices of the blocks of tokens ``[num_computed_tokens, num_tokens)`` that are not private to this sequence:
        another one uses them, or they hold a cached prefix, which any sequence may come to use.
        """
        first, last = num_computed_tokens // self.block_size, min(len(table), self.num_blocks_for(num_tokens))
        pool, cache = self.pool, self.prefix_cache
        return [i for i in range(first, last) if pool.num_refs(table[i]) > 1 or cache.holds(table[i])]
