"""The replicas as one placement sees them: a snapshot in columns, so that hundreds cost little more than one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_replica.stats import DUE_WITHIN_S, ReplicaStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

COUNTS = (  # of ReplicaStats, under the same names in ``Candidates.told``
    "block_size",
    "num_total_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "step_s",
    "token_s",
    "draining",
)
DERIVED = ("num_open_blocks", "num_open_slots")  # free, less what the replica's own queue will take
DUE = tuple(f"num_due_tokens_{place}" for place in range(len(DUE_WITHIN_S)))
"""To compute before a newcomer that is due within each of ``DUE_WITHIN_S``."""
TOLD = np.dtype(
    [
        ("connected", "?"),
        ("known", "?"),
        *(
            (name, {"step_s": "f8", "token_s": "f8", "draining": "?"}.get(name, "i8"))
            for name in (*COUNTS, *DERIVED, *DUE)
        ),
    ]
)
_DRAINING, _OPEN_BLOCKS, _OPEN_SLOTS = map(list(TOLD.names or ()).index, ("draining", *DERIVED))
PROMISED = ("num_reserved", "num_reserved_blocks", "num_reserved_tokens")
STANDING = ("capacity", "load", "sequences", "room", "open_blocks", "open_slots")
"""What a decision goes by, of both: blocks of the largest request that the replica takes, -1 for none; prompt tokens to
compute before a newcomer; sequences that decode there or soon will; free blocks for a newcomer, -1 without a free slot;
the same whether or not there is one; and free slots.
"""
CAPACITY, LOAD, SEQUENCES, ROOM, OPEN_BLOCKS, OPEN_SLOTS = range(len(PROMISED), len(PROMISED) + len(STANDING))
_counts_of = attrgetter(*COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as a policy sees it: a row of a snapshot.

    Attributes:
        replica_id: owner Ray Serve; true as of its last replica set.
        stats: owner the replica; ``age_s`` old. None until its feed has spoken.
        age_s: seconds since the gateway received ``stats``; 0 while there are none.
        connected: owner the gateway; whether the feed is up now.
        num_reserved, num_reserved_blocks, num_reserved_tokens: requests sent here that ``stats`` does not count yet,
            their blocks, and their prompt tokens to compute. Owner the gateway, exact, for its own; other gateways'
            are what the replica has heard from them.
        num_matched_blocks: leading blocks of the asked prompt that the replica caches; owner the replica's prefix
            cache, as old as ``age_s`` plus one feed message.
        node_id: owner Ray; for show.
    """

    replica_id: str
    stats: ReplicaStats | None = None
    age_s: float = 0.0
    connected: bool = False
    num_reserved: int = 0
    num_reserved_blocks: int = 0
    num_reserved_tokens: int = 0
    num_matched_blocks: int = 0
    node_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every member of the cluster for one prompt, sorted by id; element i of everything is replica i.

    Attributes:
        stats: what each replica said last; None until it has spoken.
        told: the same in columns [n], under the same names but for ``known`` (there are stats), ``DERIVED``, ``DUE``.
        columns: rows ``PROMISED``, then ``STANDING``, [9, n].
        age_s, num_matched_blocks: as in ReplicaView, [n].
    """

    replica_ids: tuple[str, ...]
    node_ids: Sequence[str]
    stats: Sequence[ReplicaStats | None]
    told: NDArray[np.void]
    columns: Ints
    age_s: Floats
    num_matched_blocks: Ints

    @classmethod
    def of(cls, views: Iterable[ReplicaView]) -> Candidates:
        """The same from rows, in any order."""
        rows = sorted(views, key=lambda row: row.replica_id)
        told, columns = unknown_rows(len(rows)), unknown_columns(len(rows))
        for place, row in enumerate(rows):
            told[place] = told_as = told_row(row.stats, row.connected)
            promised = row.num_reserved, row.num_reserved_blocks, row.num_reserved_tokens
            columns[:, place] = column(told_as, promised)
        return cls(
            tuple(row.replica_id for row in rows),
            tuple(row.node_id for row in rows),
            tuple(row.stats for row in rows),
            told,
            columns,
            np.array([row.age_s for row in rows], np.float64),
            np.array([row.num_matched_blocks for row in rows], np.int64),
        )

    def matching(self, num_matched_blocks: Ints, columns: Ints | None = None) -> Candidates:
        """The same for another prompt, and with other promises if given, by their ``columns``."""
        columns = self.columns if columns is None else columns
        told, age_s = self.told, self.age_s
        return Candidates(self.replica_ids, self.node_ids, self.stats, told, columns, age_s, num_matched_blocks)

    def __len__(self) -> int:
        return len(self.replica_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidates) and self.views() == other.views()

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_reserved(self) -> Ints:
        row: Ints = self.columns[0]
        return row

    @property
    def num_reserved_blocks(self) -> Ints:
        row: Ints = self.columns[1]
        return row

    @property
    def num_reserved_tokens(self) -> Ints:
        row: Ints = self.columns[2]
        return row

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays; what they describe is shared with other snapshots."""
        return self.told.nbytes + self.columns.nbytes + self.age_s.nbytes + self.num_matched_blocks.nbytes

    def view(self, replica_id: str) -> ReplicaView:
        """The row of one replica. Raises ValueError when it is not here."""
        return self._row(self.replica_ids.index(replica_id))

    def views(self) -> tuple[ReplicaView, ...]:
        """All rows."""
        return tuple(map(self._row, range(len(self))))

    def _row(self, place: int) -> ReplicaView:
        num_reserved, num_reserved_blocks, num_reserved_tokens = self.columns[: len(PROMISED), place].tolist()
        return ReplicaView(
            replica_id=self.replica_ids[place],
            stats=self.stats[place],
            age_s=float(self.age_s[place]),
            connected=bool(self.told["connected"][place]),
            num_reserved=num_reserved,
            num_reserved_blocks=num_reserved_blocks,
            num_reserved_tokens=num_reserved_tokens,
            num_matched_blocks=int(self.num_matched_blocks[place]),
            node_id=self.node_ids[place],
        )


def due_column(due_in_s: float) -> str:
    """Of ``DUE``, for a newcomer that is due in so many seconds."""
    return DUE[bisect_left(DUE_WITHIN_S, due_in_s)]


def told_row(stats: ReplicaStats | None, connected: bool) -> tuple[Any, ...]:
    """One element of ``Candidates.told``."""
    if stats is None:  # it has nothing, and divides by nothing either
        return (
            connected,
            False,
            *(int(name in ("block_size", "max_num_batched_tokens")) for name in (*COUNTS, *DERIVED, *DUE)),
        )
    # A queued prompt's blocks are still counted free: they are taken, all at once, when its first step is scheduled.
    num_queued_blocks = -(-stats.num_waiting_tokens // stats.block_size) if stats.num_waiting else 0
    num_open_blocks = stats.num_free_blocks - num_queued_blocks
    num_open_slots = stats.max_num_seqs - stats.num_running - stats.num_waiting
    due = stats.due_tokens if len(stats.due_tokens) == len(DUE) else (stats.num_waiting_tokens,) * len(DUE)
    return (connected, True, *_counts_of(stats), num_open_blocks, num_open_slots, *due)


def column(row: Sequence[Any], promised: Iterable[int]) -> tuple[int, ...]:
    """One of ``Candidates.columns``, for a ``told_row`` and what is promised there."""
    num_reserved, num_blocks, num_tokens = promised
    connected, known, _, num_total_blocks, _, _, num_running, num_waiting, num_waiting_tokens, *_ = row
    open_blocks, open_slots = row[_OPEN_BLOCKS] - num_blocks, row[_OPEN_SLOTS] - num_reserved
    return (
        num_reserved,
        num_blocks,
        num_tokens,
        num_total_blocks if connected and known and not row[_DRAINING] else -1,
        num_waiting_tokens + num_tokens,
        num_running + num_waiting + num_reserved,
        open_blocks if open_slots > 0 else -1,
        open_blocks,
        open_slots,
    )


def promise(columns: Ints, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
    """Count so many requests more, or less, as promised to the replica at ``place``."""
    reserved, blocks, tokens, capacity, load, sequences, _, open_blocks, open_slots = columns[:, place].tolist()
    open_blocks, open_slots = open_blocks - num_blocks, open_slots - num_requests
    columns[:, place] = (
        reserved + num_requests,
        blocks + num_blocks,
        tokens + num_tokens,
        capacity,
        load + num_tokens,
        sequences + num_requests,
        open_blocks if open_slots > 0 else -1,
        open_blocks,
        open_slots,
    )


def unknown_columns(count: int) -> Ints:
    """``columns`` of replicas that have not spoken, with nothing promised."""
    columns: Ints = np.empty((len(PROMISED) + len(STANDING), count), np.int64)
    columns[:] = np.array([column(told_row(None, False), (0, 0, 0))]).T
    return columns


def unknown_rows(count: int) -> NDArray[np.void]:
    """``told`` of replicas that have not spoken."""
    rows: NDArray[np.void] = np.empty(count, TOLD)
    rows[:] = told_row(None, False)
    return rows
