"""Blocks on two tiers against a dumb model that copies contents as the moves say and checks every block and row."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal_replica.config import CacheConfig
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash, hash_blocks

BLOCK_SIZE = 2


class TwoTierMachine(RuleBasedStateMachine):
    """The content of a full block is its hash. Sequences come, compute all of their tokens, and leave."""

    @initialize(num_blocks=st.integers(2, 8), num_rows=st.integers(0, 6))
    def make(self, num_blocks: int, num_rows: int) -> None:
        self.kv = KVCacheManager(
            CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_rows if num_rows else 0)
        )
        self.blocks: list[BlockHash | None] = [None] * num_blocks
        self.rows: list[BlockHash | None] = [None] * num_rows
        self.tables: dict[int, list[int]] = {}
        self.started: dict[int, tuple[list[int], int]] = {}  # not computed yet: tokens, matched blocks
        self.flying: list[tuple[tuple[int, int], ...]] = []  # moves of steps that were planned ahead
        self.next_id = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, tokens: list[int]) -> None:
        if self.flying:
            self.drop_ahead()  # only the scheduler starts sequences, and it drops steps planned ahead
        hashes = hash_blocks(tokens, BLOCK_SIZE)
        matched = self.kv.match(hashes, len(tokens))
        assert len(matched) * BLOCK_SIZE < len(tokens)
        assert {*hashes[: len(matched)]} <= {*self.kv.cached_hashes()}
        if not self.kv.can_allocate(matched, len(tokens)):
            return
        seq_id, self.next_id = self.next_id, self.next_id + 1
        table = self.kv.allocate(seq_id, matched, len(tokens))
        assert len(table) == -(-len(tokens) // BLOCK_SIZE)
        others = {block for other in self.tables.values() for block in other}
        assert not others & {*table[len(matched) :]}, "no block is given out twice"
        self.tables[seq_id], self.started[seq_id] = list(table), (tokens, len(matched))

    @precondition(lambda self: self.started)
    @rule()
    def step(self) -> None:
        """A step of the scheduler: its moves, then all tokens of the sequences that have started."""
        out, into = self.kv.host.take_moves()
        self.move_out(out)
        for row, block in into:
            self.blocks[block] = self.rows[row]
        assert len({block for _, block in into}) == len(into)
        for seq_id, (tokens, num_matched) in self.started.items():
            hashes, table = hash_blocks(tokens, BLOCK_SIZE), self.tables[seq_id]
            held = [self.blocks[block] for block in table[:num_matched]]
            assert held == hashes[:num_matched], "what is taken for cached is there"
            for index in range(num_matched, len(table)):
                self.blocks[table[index]] = hashes[index] if index < len(hashes) else None
            self.kv.commit(seq_id, hashes, len(tokens))
        self.started.clear()

    @precondition(lambda self: not self.started)
    @rule(data=st.data(), has_run=st.booleans())
    def grow_ahead(self, data: st.DataObject, has_run: bool) -> None:
        """Steps planned ahead give out blocks, too. The oldest then runs, or they wait; ``start`` drops them all."""
        seq_ids = [i for i in self.tables if self.kv.pool.num_free]
        if seq_ids:
            seq_id = data.draw(st.sampled_from(seq_ids))
            end = len(self.tables[seq_id]) * BLOCK_SIZE
            self.kv.append(seq_id, end, end + 1)
            self.tables[seq_id] = list(self.kv.block_table(seq_id))
            self.flying.append(self.kv.host.moves_ahead())
        if self.flying and has_run:
            moves = self.flying.pop(0)
            self.move_out(moves)
            self.kv.host.note_moved(len(moves))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A sequence ends, is aborted or is preempted: all the same to its blocks."""
        seq_id = data.draw(st.sampled_from(sorted(self.tables)))
        if seq_id in self.started:
            return
        self.kv.free(seq_id)
        del self.tables[seq_id]

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants()
            assert self.kv.pool.num_allocated == len({b for table in self.tables.values() for b in table})

    def drop_ahead(self) -> None:
        self.flying.clear()
        out, into = self.kv.host.take_moves()
        assert not into
        self.move_out(out)

    def move_out(self, moves: tuple[tuple[int, int], ...]) -> None:
        assert len({row for _, row in moves}) == len(moves), "no row is written twice in a step"
        for block, row in moves:
            self.rows[row] = self.blocks[block]
            assert self.rows[row] is not None

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        if self.started:
            self.step()
        self.drop_ahead()
        held = {*self.kv.host.hashes()}
        assert held <= {*self.rows}, "each hash that the host has is in a row"
        for seq_id in list(self.tables):
            self.kv.free(seq_id)
        assert self.kv.pool.num_allocated == 0


TwoTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTwoTiers = TwoTierMachine.TestCase
