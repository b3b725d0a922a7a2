"""The replicas as one placement sees them: a columnar snapshot, so that hundreds cost little more than one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from itertools import compress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.columns import (
    CAPACITY,
    LOAD,
    PROMISED,
    RESERVED,
    RESERVED_BLOCKS,
    RESERVED_TOKENS,
    STANDING,
    TOLD,
    Floats,
    Ints,
    Phase,
    ReplicaState,
    column,
    told_row,
    unknown_columns,
)
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_replica.stats import ReplicaStats

Item = TypeVar("Item")

BYTES_EACH = 8 * (len(PROMISED) + len(STANDING) + 3)


class SharedTold:
    """The view's own ``told``, which snapshots share until a report changes it: then ``is_past`` is set before, and a
    snapshot rebuilds its own from the replicas' last reports.
    """

    __slots__ = ("is_past", "told")

    def __init__(self, told: NDArray[np.void]) -> None:
        self.told = told
        self.is_past = False


class Candidates:
    """Every member of the cluster for one prompt, sorted by id; element i of everything is replica i. Never modified.

    Attributes:
        stats: each replica's last report; None until there is one.
        columns: rows ``PROMISED``, then ``STANDING``, [11, n].
        now, updated_s: ``age_s`` is their difference; ``updated_s`` [n] is infinite for a replica without a report.
        states, num_matched_blocks: as in ReplicaView, [n].
    """

    __slots__ = (
        "_age_s",
        "_shared_told",
        "_told",
        "columns",
        "node_ids",
        "now",
        "num_matched_blocks",
        "replica_ids",
        "states",
        "stats",
        "updated_s",
    )

    def __init__(
        self,
        replica_ids: tuple[str, ...],
        node_ids: Sequence[str],
        stats: Sequence[ReplicaStats | None],
        states: Sequence[ReplicaState],
        columns: Ints,
        now: float,
        updated_s: Floats,
        num_matched_blocks: Ints,
        shared_told: SharedTold | None = None,
    ) -> None:
        self.replica_ids = replica_ids
        self.node_ids = node_ids
        self.stats = stats
        self.states = states
        self.columns = columns
        self.now = now
        self.updated_s = updated_s
        self.num_matched_blocks = num_matched_blocks
        self._shared_told = shared_told
        self._told: NDArray[np.void] | None = None
        self._age_s: Floats | None = None

    @classmethod
    def of(cls, views: Iterable[ReplicaView]) -> Candidates:
        """A snapshot made from rows in any order."""
        rows = sorted(views, key=lambda row: row.replica_id)
        columns = unknown_columns(len(rows))
        for place, row in enumerate(rows):
            promised = row.num_reserved, row.num_reserved_blocks, row.num_reserved_tokens
            columns[:, place] = column(told_row(row.stats, row.state), promised)
        return cls(
            tuple(row.replica_id for row in rows),
            tuple(row.node_id for row in rows),
            tuple(row.stats for row in rows),
            tuple(row.state for row in rows),
            columns,
            0.0,
            np.array([-row.age_s for row in rows], np.float64),
            np.array([row.num_matched_blocks for row in rows], np.int64),
        )

    def matching(self, num_matched_blocks: Ints, columns: Ints | None = None) -> Candidates:
        """The same snapshot for another prompt and, if ``columns`` are given, with other promises."""
        return Candidates(
            self.replica_ids,
            self.node_ids,
            self.stats,
            self.states,
            self.columns if columns is None else columns,
            self.now,
            self.updated_s,
            num_matched_blocks,
            self._shared_told,
        )

    def __len__(self) -> int:
        return len(self.replica_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidates) and self.views() == other.views()

    __hash__ = None  # type: ignore[assignment]

    @property
    def told(self) -> NDArray[np.void]:
        """``stats`` as columns [n] under the same names, with ``known`` (whether there are any), ``states``,
        ``DERIVED`` and ``DUE``. A snapshot of the past rebuilds it on demand.
        """
        if self._told is None:
            if self._shared_told is not None and not self._shared_told.is_past:
                return self._shared_told.told
            self._told = np.array([*map(told_row, self.stats, self.states)], TOLD)
        return self._told

    @property
    def age_s(self) -> Floats:
        """As in ReplicaView, [n]."""
        if self._age_s is None:
            self._age_s = np.maximum(self.now - self.updated_s, 0.0)
        return self._age_s

    def num_idle(self) -> int:
        """How many replicas that accept requests have nothing to compute, and nothing known to be on its way."""
        return int(np.count_nonzero((self.columns[CAPACITY] >= 0) & (self.columns[LOAD] == 0)))

    def mostly_decode(self) -> bool:
        """Whether at least half of the replicas that accept requests compute no prompt: a decode is one token each."""
        accepts = self.columns[CAPACITY] >= 0
        decode = accepts & (self.columns[LOAD] <= self.told["num_running"])
        return 2 * int(np.count_nonzero(decode)) >= max(1, int(np.count_nonzero(accepts)))

    def serves(self, phase: Phase) -> NDArray[np.bool_]:
        """Which replicas are for requests of this phase, among others or alone; "" for all [n]."""
        return np.array([phase == "" or state.role in ("", phase) for state in self.states], np.bool_)

    def has_open(self, excluded: Set[str] = frozenset()) -> bool:
        """Whether a replica that is not ``excluded`` accepts requests, with or without room for them now."""
        takes = self.columns[CAPACITY] >= 0
        return any(r not in excluded for r in compress(self.replica_ids, takes)) if excluded else bool(takes.any())

    @property
    def num_reserved(self) -> Ints:
        row: Ints = self.columns[RESERVED]
        return row

    @property
    def num_reserved_blocks(self) -> Ints:
        row: Ints = self.columns[RESERVED_BLOCKS]
        return row

    @property
    def num_reserved_tokens(self) -> Ints:
        row: Ints = self.columns[RESERVED_TOKENS]
        return row

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, without ``stats``: other snapshots share those of replicas that say no more."""
        return len(self.replica_ids) * BYTES_EACH

    def view(self, replica_id: str) -> ReplicaView:
        """The row of one replica. Raises ValueError if it is not in the snapshot."""
        return self._row(self.place(replica_id))

    def place(self, replica_id: str) -> int:
        """The index of one replica. Raises ValueError if it is not in the snapshot."""
        place = bisect_left(self.replica_ids, replica_id)
        if self.replica_ids[place : place + 1] != (replica_id,):
            raise ValueError(f"replica_id: {replica_id!r} is not here")
        return place

    def matched_by(self, replica_id: str) -> int:
        """``num_matched_blocks`` of one replica. Raises ValueError if it is not in the snapshot."""
        count: int = self.num_matched_blocks.item(self.place(replica_id))
        return count

    def age_of(self, replica_id: str) -> float:
        """``age_s`` of one replica. Raises ValueError if it is not in the snapshot."""
        return max(0.0, self.now - self.updated_s.item(self.place(replica_id)))

    def views(self) -> tuple[ReplicaView, ...]:
        """All rows."""
        return tuple(map(self._row, range(len(self))))

    def _row(self, place: int) -> ReplicaView:
        num_reserved, num_reserved_blocks, num_reserved_tokens = self.columns[: len(PROMISED), place].tolist()
        return ReplicaView(
            replica_id=self.replica_ids[place],
            stats=self.stats[place],
            age_s=float(self.age_s[place]),
            **self.states[place]._asdict(),
            num_reserved=num_reserved,
            num_reserved_blocks=num_reserved_blocks,
            num_reserved_tokens=num_reserved_tokens,
            num_matched_blocks=int(self.num_matched_blocks[place]),
            node_id=self.node_ids[place],
        )


def with_item(items: tuple[Item, ...], place: int, item: Item) -> tuple[Item, ...]:
    """``items`` with ``item`` at ``place``."""
    return (*items[:place], item, *items[place + 1 :])
