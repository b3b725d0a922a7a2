"""What a gateway knows of each member of the cluster, in columns that snapshots share until something changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shoal_cluster.policies.candidates import Candidates, Item, SharedTold, with_item
from shoal_cluster.policies.columns import (
    PROMISED,
    TOLD,
    UNKNOWN,
    ReplicaState,
    column,
    promise,
    told_row,
    unknown_columns,
)
from shoal_cluster.policies.reservation import Reservation
from shoal_replica.stats import ReplicaStats


class ViewColumns:
    """The columns of ``Candidates``, with one element per member, sorted by id. Owned by a ``ClusterView``.

    Attributes:
        replica_ids: the members, sorted.
        place_of: the element of each member.
        states: what the gateway has found out about each.
    """

    def __init__(self) -> None:
        self.replica_ids: tuple[str, ...] = ()
        self.place_of: dict[str, int] = {}
        self.states: tuple[ReplicaState, ...] = ()
        self._node_ids: tuple[str, ...] = ()
        self._stats: list[ReplicaStats | None] = []
        self._rows: list[tuple[Any, ...]] = []  # those of ``_told``
        self._told, self._columns = np.array([], TOLD), unknown_columns(0)
        self._foreign: list[tuple[int, int, int]] = []  # the part that other gateways have promised
        self._updated_s = np.zeros(0)  # infinite while there are no stats
        self._shared_told = SharedTold(self._told)
        self._is_told_shared = self._is_promised_shared = False  # with snapshots: copy before a change
        self._nothing = np.zeros(0, np.int64)
        self._present: Candidates | None = None  # the last snapshot; None after a change

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """From now on these are the members; those that stay keep what is known of them."""
        members = tuple(sorted(replica_ids))
        places = [self.place_of.get(replica_id) for replica_id in members]  # where each was; None for one that is new

        def carried(values: Sequence[Item], default: Item) -> list[Item]:
            return [default if place is None else values[place] for place in places]

        columns = unknown_columns(len(members))
        for new, old in enumerate(places):
            if old is not None:
                columns[:, new] = self._columns[:, old]
        self._columns = columns
        self._stats = carried(self._stats, None)
        self.states = tuple(carried(self.states, UNKNOWN))
        self._rows = carried(self._rows, told_row(None, UNKNOWN))
        self._told = np.array(self._rows, TOLD)
        self._updated_s = np.array(carried(self._updated_s.tolist(), np.inf))
        self._foreign, self._node_ids = carried(self._foreign, (0, 0, 0)), tuple(carried(self._node_ids, ""))
        self._is_told_shared = self._is_promised_shared = False
        self._shared_told, self._present = SharedTold(self._told), None
        self._nothing, self.replica_ids = np.zeros(len(members), np.int64), members
        self.place_of = {replica_id: place for place, replica_id in enumerate(members)}

    def set_node(self, place: int, node_id: str) -> None:
        """The node that a member runs on is known."""
        self._node_ids = with_item(self._node_ids, place, node_id)
        self._present = None

    def hear(self, place: int, stats: ReplicaStats | None, now: float) -> None:
        """A member has reported; without ``stats`` its last ones still hold."""
        self._own_told()
        if stats is not None:
            self._stats[place] = stats
            if (row := told_row(stats, self.states[place])) != self._rows[place]:
                self._told[place] = self._rows[place] = row
                self._tell(place, row)
        self._updated_s[place] = now

    def mark(self, place: int, **changes: Any) -> None:
        """Change fields of a member's ``ReplicaState``."""
        state = self.states[place]._replace(**changes)
        if state == self.states[place]:
            return
        self._own_told()
        self.states = with_item(self.states, place, state)
        self._told[place] = self._rows[place] = told_row(self._stats[place], state)
        self._tell(place, self._rows[place])  # at once: ``hear`` will not, if the next stats give the same row

    def promise(self, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        """Count that many more requests, blocks and tokens as promised to a member; fewer if negative."""
        self._own_promised()
        promise(self._columns, place, num_requests, num_blocks, num_tokens)

    def set_foreign(self, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        """Set the requests, blocks and tokens that other gateways have promised to a member."""
        before, foreign = self._foreign[place], (num_requests, num_blocks, num_tokens)
        if foreign != before:
            self._foreign[place] = foreign
            self.promise(place, num_requests - before[0], num_blocks - before[1], num_tokens - before[2])

    def present(self, now: float) -> Candidates:
        """A snapshot for no prompt, valid only until something changes."""
        if self._present is None or self._present.now != now:
            self._present = Candidates(
                self.replica_ids,
                self._node_ids,
                self._stats,
                self.states,
                self._columns,
                now,
                self._updated_s,
                self._nothing,
                self._shared_told,
            )
        return self._present

    def snapshot(self, now: float) -> Candidates:
        """``present`` to keep: later changes do not show in it."""
        self._is_told_shared = self._is_promised_shared = True
        return self.present(now)

    def check_invariants(self, reservations: Iterable[Reservation]) -> None:
        """Promises add up to what this gateway has reserved and others tell; columns agree with the stats."""
        sums = np.array(self._foreign, np.int64).reshape(-1, len(PROMISED)).T
        for reservation in reservations:
            sums[:, self.place_of[reservation.replica_id]] += (1, reservation.num_blocks, reservation.num_tokens)
        for place, promised in enumerate(sums.T):
            assert tuple(self._columns[:, place]) == column(self._rows[place], promised)
            assert self._told[place].item() == self._rows[place]
        assert list(self.place_of.items()) == [(r, place) for place, r in enumerate(sorted(self.replica_ids))]
        for stats, row, state in zip(self._stats, self._rows, self.states, strict=True):
            assert row == told_row(stats, state)
            assert not state.connected or stats is not None

    def _tell(self, place: int, row: Sequence[Any]) -> None:
        """A member's row of ``_told`` has changed to ``row``."""
        self._own_promised()
        self._columns[:, place] = column(row, self._columns[: len(PROMISED), place].tolist())

    def _own_told(self) -> None:
        """Call before a member's report or its time changes."""
        self._present = None
        if self._is_told_shared:
            self._is_told_shared = False
            self._stats, self._updated_s = self._stats[:], self._updated_s.copy()
            self._shared_told.is_past = True
            self._shared_told = SharedTold(self._told)

    def _own_promised(self) -> None:
        """Call before a column changes."""
        self._present = None
        if self._is_promised_shared:
            self._is_promised_shared = False
            self._columns = self._columns.copy()
