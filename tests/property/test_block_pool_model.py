"""Block pool, prefix cache and block tables against a dumb model that remembers what each slot of each block holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal_replica.config import CacheConfig
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.partial_reuse import WORTH_A_COPY, Tokens
from shoal_replica.prefix_cache import hash_blocks

Prefix = tuple[int, ...]


class BlockMachine(RuleBasedStateMachine):
    """A slot's content is the whole prefix up to its token, since real keys and values depend on all of it."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        partial=st.sampled_from([True, True, False]),
    )
    def make(self, num_blocks: int, block_size: int, caching: bool, partial: bool) -> None:
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            enable_partial_reuse=partial,
        )
        self.kv = KVCacheManager(config)
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.partial = caching and partial
        self.slots: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.committed: dict[int, int] = {}  # blocks already offered to the cache: each is offered once
        self.tables: dict[int, list[int]] = {}
        self.cached: dict[Prefix, int] = {}
        self.mirror: set[bytes] = set()
        self.next_id = 0

    # The dumb model's answers

    @property
    def free_blocks(self) -> set[int]:
        return set(range(self.num_blocks)) - {b for table in self.tables.values() for b in table}

    def matched(self, tokens: list[int]) -> list[int]:
        block_ids: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block_id = self.cached.get(tuple(tokens[:end]))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def most_in_common(self, tokens: list[int], num_matched: int) -> int:
        """How many tokens after the matched blocks some cached block also holds; the last one is always computed."""
        start = num_matched * self.block_size
        wanted = tuple(tokens[: min(start + self.block_size, len(tokens) - 1)])
        held = [prefix for prefix in self.cached if len(prefix) == start + self.block_size] if self.partial else []
        counts = range(max(0, len(wanted) - start), 0, -1)
        most = next((n for n in counts if any(h[: start + n] == wanted[: start + n] for h in held)), 0)
        return most if most * WORTH_A_COPY >= self.block_size else 0

    def take(self, block_ids: list[int], free_before: set[int]) -> None:
        """Check blocks that were given out: they were free, and those with no cached prefix went first."""
        assert len(set(block_ids)) == len(block_ids)
        assert set(block_ids) <= free_before
        lost = {prefix for prefix, b in self.cached.items() if b in block_ids}
        if lost:
            assert free_before - set(block_ids) <= set(self.cached.values())
        for prefix in lost:
            del self.cached[prefix]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tables)))

    # Commands

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def allocate(self, tokens: list[int]) -> None:
        self.start(tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), count=st.integers(1, 20), ends=st.booleans())
    def run(self, tokens: list[int], count: int, ends: bool) -> None:
        """Most of a sequence's life at once."""
        seq_id = self.start(tokens)
        if seq_id is not None:
            self.advance(seq_id, [], count)
            if ends:
                self.end(seq_id)

    def start(self, tokens: list[int]) -> int | None:
        """Allocate for a new sequence; None if it does not fit."""
        hashes = hash_blocks(tokens, self.block_size)
        matched = self.kv.match(hashes, len(tokens))
        assert matched == self.matched(tokens)
        free = self.free_blocks
        num_new = -(-len(tokens) // self.block_size) - len(matched)
        fits = num_new <= len(free - set(matched))
        assert self.kv.can_allocate(matched, len(tokens)) is fits
        if not fits:
            return None
        part = self.kv.match_within(hashes, len(matched), Tokens(tokens, ""))
        assert (part.num_tokens if part else 0) == self.most_in_common(tokens, len(matched))
        if part is not None:
            self.kv.refresh(part.block_id)
            if part.block_id in free:
                assert self.kv.pool._free.in_order()[-1] == part.block_id
        seq_id, self.next_id = self.next_id, self.next_id + 1
        table = self.kv.allocate(seq_id, matched, len(tokens))
        assert table[: len(matched)] == matched
        assert len(table) == len(matched) + num_new
        self.take(table[len(matched) :], free - set(matched))
        self.tokens[seq_id], self.tables[seq_id] = list(tokens), list(table)
        self.computed[seq_id] = len(matched) * self.block_size
        if part is not None:
            self.slots[table[len(matched)]] = list(self.slots[part.block_id])
            self.computed[seq_id] += part.num_tokens
        self.committed[seq_id] = len(matched)
        return seq_id

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), new_tokens=st.lists(st.integers(0, 1), max_size=6), count=st.integers(1, 12))
    def compute(self, data: st.DataObject, new_tokens: list[int], count: int) -> None:
        self.advance(self.pick(data), new_tokens, count)

    def advance(self, seq_id: int, new_tokens: list[int], count: int) -> None:
        """Give a sequence more tokens and compute some of those it lacks, as a step does."""
        tokens, table = self.tokens[seq_id], self.tables[seq_id]
        tokens.extend(new_tokens)
        start = self.computed[seq_id]
        end = min(len(tokens), start + count)
        others = [b for other, t in self.tables.items() if other != seq_id for b in t]
        read_by_others = {*others, *self.cached.values()}  # any sequence may come to read a cached block
        written = range(start // self.block_size, min(len(table), -(-end // self.block_size)))
        shared = [i for i in written if table[i] in read_by_others]
        num_needed = max(0, -(-end // self.block_size) - len(table)) + len(shared)
        assert self.kv.num_blocks_to_append(seq_id, start, end) == num_needed
        assert self.kv.reads_shared(seq_id, start, end) is bool(shared)
        if start < end:
            in_last = start >= (len(table) - 1) * self.block_size and end <= len(table) * self.block_size
            assert self.kv.fits_last_block(seq_id, start, end) is (in_last and num_needed == 0)
        free = self.free_blocks
        if num_needed > len(free):
            return
        change = self.kv.append(seq_id, start, end)
        assert (change is None) is (num_needed == 0)
        if change is not None:
            assert [source for source, _ in change.copies] == [table[i] for i in shared]
            kept = table[change.first_index :]
            table[change.first_index :] = change.block_ids
            self.take([b for b in change.block_ids if b not in kept], free)
            for source, destination in change.copies:
                self.slots[destination] = list(self.slots[source])
        for position in range(start, end):
            block_id, offset = table[position // self.block_size], position % self.block_size
            assert block_id not in others, "nobody writes what another sequence reads"
            assert block_id not in self.cached.values(), "nobody writes what the cache offers"
            self.slots[block_id][offset] = tuple(tokens[: position + 1])
        self.computed[seq_id] = end
        self.commit(seq_id)

    def commit(self, seq_id: int) -> None:
        tokens, num_computed = self.tokens[seq_id], self.computed[seq_id]
        self.kv.commit(seq_id, hash_blocks(tokens, self.block_size), num_computed, Tokens(tokens, ""))
        if not self.caching:
            return
        offered = range(self.committed[seq_id], num_computed // self.block_size)
        self.committed[seq_id] = max(offered.start, offered.stop)
        for index in offered:
            block_id = self.tables[seq_id][index]
            prefix = tuple(tokens[: (index + 1) * self.block_size])
            if block_id not in self.cached.values():
                self.cached.setdefault(prefix, block_id)

    @precondition(lambda self: any(self.computed.values()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """The child computes the parent's last token again."""
        parent = data.draw(st.sampled_from(sorted(s for s, count in self.computed.items() if count)))
        child, self.next_id = self.next_id, self.next_id + 1
        assert self.kv.fork(parent, child) == self.tables[parent]
        num_computed = self.computed[parent]
        self.tokens[child], self.tables[child] = self.tokens[parent][:num_computed], list(self.tables[parent])
        self.computed[child] = num_computed - 1
        self.committed[child] = self.committed[parent]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(self.pick(data))

    def end(self, seq_id: int) -> None:
        self.kv.free(seq_id)
        del self.tokens[seq_id], self.tables[seq_id], self.computed[seq_id], self.committed[seq_id]

    # After every step

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        heat = self.kv.pool.heat()
        assert [max(0, cell - 128) for cell in heat] == [
            sum(table.count(b) for table in self.tables.values()) for b in range(self.num_blocks)
        ]
        assert {b for b, cell in enumerate(heat) if 0 < cell < 128} == self.free_blocks & set(self.cached.values())
        free = self.free_blocks
        pool = self.kv.pool
        assert (pool.num_free, pool.num_allocated) == (len(free), self.num_blocks - len(free))
        assert pool.num_cached == len(free & set(self.cached.values()))
        assert {s: self.kv.block_table(s) for s in self.tables} == self.tables

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for seq_id, table in getattr(self, "tables", {}).items():
            for position in range(self.computed[seq_id]):
                content = self.slots[table[position // self.block_size]][position % self.block_size]
                assert content == tuple(self.tokens[seq_id][: position + 1])

    @invariant()
    def the_cache_is_what_its_events_say(self) -> None:
        if not hasattr(self, "kv"):
            return
        stored, removed = self.kv.prefix_cache.take_events()
        assert self.mirror.isdisjoint(stored)
        assert self.mirror.issuperset(removed)
        self.mirror = (self.mirror - set(removed)) | set(stored)
        assert self.mirror == {hash_blocks(prefix, self.block_size)[-1] for prefix in self.cached}
        for prefix, block_id in self.cached.items():
            assert self.slots[block_id][-1] == prefix


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=30)
