"""The prefix cache's second tier: blocks in host memory, which are brought back by a copy instead of recomputed.

When the pool gives out a block that holds a prefix, the content is first moved to a row of host memory. The KV of
preempted sequences and finished requests thus outlives its place on the device. Rows are evicted in LRU order. This
module moves nothing itself: it records moves, and the next step carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal_replica.prefix_cache import BlockHash

Move = tuple[int, int]
"""(source, destination): block and row on the way out, row and block on the way in."""


class HostBlocks:
    """``num_rows`` rows, each free or holding one full block. With no rows there is no second tier.

    A row that a move still reads or writes is busy, and is not evicted, until a step has taken the move.

    Args:
        on_forget: called with the evicted hash when its row is given to another.

    Attributes:
        num_out, num_in: blocks moved to rows and back since the start.
    """

    def __init__(self, num_rows: int, on_forget: Callable[[BlockHash], None]) -> None:
        self.num_rows = num_rows
        self.num_out = self.num_in = 0
        self._on_forget = on_forget
        self._rows: dict[BlockHash, int] = {}  # least recently used first
        self._free = list(reversed(range(num_rows)))
        self._out: list[tuple[BlockHash, int, int]] = []  # hash, block, row of moves not known to have been made
        self._num_sent = 0  # how many of these are in steps planned ahead, which may still be dropped
        self._in: list[Move] = []
        self._busy: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._rows

    def hashes(self) -> Iterable[BlockHash]:
        """The hashes that rows hold, least recently used first."""
        return self._rows.keys()

    def keep(self, block_hash: BlockHash, block_id: int) -> bool:
        """Move out a block that is about to be overwritten, unless a row already holds it. False if no row is free or
        can be evicted.
        """
        if block_hash in self._rows:
            self._rows[block_hash] = self._rows.pop(block_hash)
            return True
        row = self._take_row()
        if row is None:
            return False
        self._rows[block_hash] = row
        self._busy.add(block_hash)
        self._out.append((block_hash, block_id, row))
        self.num_out += 1
        return True

    def hold(self, block_hashes: Iterable[BlockHash]) -> None:
        """Keep rows that are about to be read until the next step takes its moves."""
        for block_hash in block_hashes:
            self._rows[block_hash] = self._rows.pop(block_hash)
            self._busy.add(block_hash)

    def bring(self, block_hash: BlockHash, block_id: int) -> None:
        """Copy a row, protected by ``hold``, to a block."""
        self._in.append((self._rows[block_hash], block_id))
        self.num_in += 1

    @property
    def is_planned(self) -> bool:
        """Whether moves out are in steps planned ahead, which may still be dropped."""
        return self._num_sent > 0

    def take_moves(self) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        """All moves out (block, row) and all moves in (row, block), for a step that is sure to run."""
        out, into = tuple((block, row) for _, block, row in self._out), tuple(self._in)
        self._out, self._num_sent, self._in = [], 0, []
        self._busy.clear()
        return out, into

    def moves_ahead(self) -> tuple[Move, ...]:
        """Moves out for a step planned ahead: those that no earlier planned step carries."""
        moves = tuple((block, row) for _, block, row in self._out[self._num_sent :])
        self._num_sent = len(self._out)
        return moves

    def note_moved(self, num_moves: int) -> None:
        """The first step planned ahead has run, with ``num_moves`` moves out. A dropped step's moves stay recorded."""
        self._busy.difference_update(block_hash for block_hash, _, _ in self._out[:num_moves])
        del self._out[:num_moves]
        self._num_sent -= num_moves

    def note_dropped(self) -> None:
        """No step is planned ahead any more. What was to be moved stays recorded."""
        self._num_sent = 0

    def coming(self) -> tuple[tuple[BlockHash, int], ...]:
        """What is to be moved out, each with its row."""
        return tuple((block_hash, row) for block_hash, _, row in self._out)

    def forget(self, lost: Iterable[tuple[BlockHash, int]]) -> None:
        """What was ``coming`` is not there: the step that should have moved it has failed. Rows that others have got
        since, and what is to be moved again, stay.
        """
        again = {block_hash for block_hash, _ in self.coming()}
        for block_hash, row in lost:
            if self._rows.get(block_hash) == row and block_hash not in again:
                self._free.append(self._rows.pop(block_hash))
                self._busy.discard(block_hash)
                self._on_forget(block_hash)

    def check_invariants(self) -> None:
        """Every row is free or holds one block; every block to be moved has a row."""
        rows = [*self._rows.values(), *self._free]
        assert sorted(rows) == list(range(self.num_rows))
        assert all(self._rows[block_hash] == row for block_hash, _, row in self._out)
        assert len({row for _, _, row in self._out}) == len(self._out)
        assert {block_hash for block_hash, _, _ in self._out} <= self._busy <= self._rows.keys()
        assert 0 <= self._num_sent <= len(self._out)

    def _take_row(self) -> int | None:
        """A free row, or that of the least recently used hash, which is evicted. None if that row is busy."""
        if self._free:
            return self._free.pop()
        victim = next(iter(self._rows), None)
        if victim is None or victim in self._busy:
            return None
        row = self._rows.pop(victim)
        self._on_forget(victim)
        return row
