"""The replicas as one placement sees them: a snapshot in columns, so that hundreds cost little more than one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

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
PROMISED = ("num_reserved", "num_reserved_blocks", "num_reserved_tokens")
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
        promised: rows ``PROMISED``, [3, n].
        age_s, num_matched_blocks: as in ReplicaView, [n].
    """

    replica_ids: tuple[str, ...]
    node_ids: Sequence[str]
    stats: Sequence[ReplicaStats | None]
    told: NDArray[np.void]
    promised: Ints
    age_s: Floats
    num_matched_blocks: Ints

    @classmethod
    def of(cls, views: Iterable[ReplicaView]) -> Candidates:
        """The same from rows, in any order."""
        rows = sorted(views, key=lambda row: row.replica_id)
        told = unknown_rows(len(rows))
        for place, row in enumerate(rows):
            told[place] = told_row(row.stats, row.connected)
        return cls(
            tuple(row.replica_id for row in rows),
            tuple(row.node_id for row in rows),
            tuple(row.stats for row in rows),
            told,
            np.array([[getattr(row, name) for row in rows] for name in PROMISED], np.int64),
            np.array([row.age_s for row in rows], np.float64),
            np.array([row.num_matched_blocks for row in rows], np.int64),
        )

    def matching(self, num_matched_blocks: Ints, promised: Ints | None = None) -> Candidates:
        """The same for another prompt, and with other promises if given."""
        promised = self.promised if promised is None else promised
        told, age_s = self.told, self.age_s
        return Candidates(self.replica_ids, self.node_ids, self.stats, told, promised, age_s, num_matched_blocks)

    def __len__(self) -> int:
        return len(self.replica_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidates) and self.views() == other.views()

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_reserved(self) -> Ints:
        row: Ints = self.promised[0]
        return row

    @property
    def num_reserved_blocks(self) -> Ints:
        row: Ints = self.promised[1]
        return row

    @property
    def num_reserved_tokens(self) -> Ints:
        row: Ints = self.promised[2]
        return row

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays; what they describe is shared with other snapshots."""
        return self.told.nbytes + self.promised.nbytes + self.age_s.nbytes + self.num_matched_blocks.nbytes

    def view(self, replica_id: str) -> ReplicaView:
        """The row of one replica. Raises ValueError when it is not here."""
        return self._row(self.replica_ids.index(replica_id))

    def views(self) -> tuple[ReplicaView, ...]:
        """All rows."""
        return tuple(map(self._row, range(len(self))))

    def _row(self, place: int) -> ReplicaView:
        num_reserved, num_reserved_blocks, num_reserved_tokens = self.promised[:, place].tolist()
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


def told_row(stats: ReplicaStats | None, connected: bool) -> tuple[object, ...]:
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


def unknown_rows(count: int) -> NDArray[np.void]:
    """``told`` of replicas that have not spoken."""
    rows: NDArray[np.void] = np.empty(count, TOLD)
    rows[:] = told_row(None, False)
    return rows
