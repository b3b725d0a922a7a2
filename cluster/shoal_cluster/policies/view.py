"""The gateway's dated copy of every replica's ledger: what it was told, plus what it has promised since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal_cluster.policies.candidates import Candidates, Item, SharedTold, with_item
from shoal_cluster.policies.columns import (
    PROMISED,
    TOLD,
    UNKNOWN,
    Ints,
    Phase,
    ReplicaState,
    column,
    promise,
    told_row,
    unknown_columns,
)
from shoal_cluster.policies.in_flight import PromptKey, PromptsInFlight
from shoal_cluster.policies.matches import Matches
from shoal_cluster.policies.prefix_index import DEFAULT_MAX_ENTRIES, PrefixIndex
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.reservation import Reservation
from shoal_cluster.policies.wishes import ForeignWishes, PlacedWish, Wish
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.stats import ReplicaStats


class ClusterView:
    """Every replica's ledger in one place. The gateway owns it and is its only writer.

    Membership comes from Ray Serve (``join``, ``leave``), ledgers from the feeds (``apply_snapshot``, then
    ``apply_update`` for each later message, ``disconnect`` when a feed ends), reservations from routing.
    ``now`` is the gateway's monotonic clock, in seconds. News of a replica that is not a member is dropped: a feed's
    last messages may arrive after the replica has left.
    """

    def __init__(self, max_index_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._reservations: dict[str, Reservation] = {}
        self._in_flight = PromptsInFlight()
        self._wishes = ForeignWishes()
        self.index = PrefixIndex(max_index_entries)
        self.has_roles = False  # whether members are for one phase of requests only
        # Members sorted by id, and the columns of ``Candidates`` with one element per member.
        self._place_of: dict[str, int] = {}
        self._replica_ids: tuple[str, ...] = ()
        self._node_ids: tuple[str, ...] = ()
        self._stats: list[ReplicaStats | None] = []
        self._rows: list[tuple[Any, ...]] = []  # those of ``_told``
        self._states: tuple[ReplicaState, ...] = ()
        self._told, self._columns = np.array([], TOLD), unknown_columns(0)
        self._foreign: list[tuple[int, int, int]] = []  # the part that other gateways have promised
        self._updated_s = np.zeros(0)  # infinite while there are no stats
        self._shared_told = SharedTold(self._told)
        self._is_told_shared = self._is_promised_shared = False  # with snapshots: copy before a change
        self._nothing = np.zeros(0, np.int64)
        self._matches = Matches()
        self._present: Candidates | None = None  # the last snapshot for no prompt; None after a change

    def __len__(self) -> int:
        return len(self._replica_ids)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._place_of

    def is_connected(self, replica_id: str) -> bool:
        """Whether ``replica_id`` is a member whose feed is open."""
        return replica_id in self and self._states[self._place_of[replica_id]].connected

    def is_stalled(self, replica_id: str) -> bool:
        """Whether ``replica_id`` is a member that is marked as stalled."""
        return replica_id in self and self._states[self._place_of[replica_id]].stalled

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Ids of the members, sorted."""
        return self._replica_ids

    def join(self, replica_id: str, node_id: str = "") -> None:
        """Add a member. Nothing is routed to it before its first snapshot. Idempotent."""
        if replica_id not in self._place_of:
            self._set_members((*self._replica_ids, replica_id))
        if node_id:
            place = self._place_of[replica_id]
            self._node_ids = with_item(self._node_ids, place, node_id)
            self._present = None

    def leave(self, replica_id: str) -> None:
        """Remove a member: forget its blocks, its stats and what was promised on it. Idempotent."""
        if replica_id not in self._place_of:
            return
        for request_id in [i for i, r in self._reservations.items() if r.replica_id == replica_id]:
            self.release(request_id)
        self._in_flight.forget(replica_id)
        self._set_members(member for member in self._replica_ids if member != replica_id)
        self.index.drop(replica_id)
        self._wishes.set(replica_id, ())

    def apply_snapshot(
        self, replica_id: str, stats: ReplicaStats, block_hashes: Iterable[BlockHash], now: float
    ) -> bool:
        """Take a replica's complete ledger. False if it is not a member."""
        place = self._place_of.get(replica_id)
        if place is None:
            return False
        self.index.replace(replica_id, block_hashes)
        self._mark(place, self._states[place]._replace(connected=True, stalled=False))
        self._take(place, stats, now)
        return True

    def apply_update(
        self,
        replica_id: str,
        stats: ReplicaStats | None,
        stored: Collection[BlockHash],
        removed: Collection[BlockHash],
        now: float,
    ) -> bool:
        """Apply the changes since the last message. False if the view needs a snapshot first (or knows no such member).

        ``removed`` applies before ``stored``: the events are net, no hash is in both. Without ``stats`` the last ones
        still hold.
        """
        place = self._place_of.get(replica_id)
        if place is None or not self._states[place].connected:
            return False
        if stored or removed:
            self.index.change(replica_id, stored, removed)
        self._take(place, stats, now)
        return True

    def set_stalled(self, replica_id: str, is_stalled: bool) -> None:
        """Mark whether it makes no progress and is sent nothing new. Ignored unless it is a member."""
        self._change(replica_id, stalled=is_stalled)

    def set_slowness(self, replica_id: str, slowness: float) -> None:
        """Set how many times as long as the fastest it takes for a prompt. Ignored unless it is a member."""
        self._change(replica_id, slowness=slowness)

    def set_roles(self, roles: Mapping[str, Phase]) -> None:
        """Set the phases that members are for, "" unless named. Queues look members up anew, as if some had joined."""
        self.has_roles = any(roles.values())
        for replica_id in self._replica_ids:
            self._change(replica_id, role=roles.get(replica_id, ""))
        self._set_members(self._replica_ids)

    def disconnect(self, replica_id: str) -> None:
        """A replica's feed ended: nothing new is sent there until the next snapshot. Its last ledger stays visible."""
        self._change(replica_id, connected=False, stalled=False)

    def reserve(self, request_id: str, replica_id: str, num_blocks: int, num_tokens: int) -> None:
        """Promise room on ``replica_id``, in place of the request's earlier promise.

        Args:
            num_blocks: free blocks that the request will take.
            num_tokens: prompt tokens that the replica will have to compute for it.
        """
        self.release(request_id)
        if replica_id in self._place_of:
            reservation = Reservation(replica_id, num_blocks, num_tokens)
            self._reservations[request_id] = reservation
            self._count(reservation, +1)

    def move(self, request_id: str, replica_id: str) -> None:
        """Move a request's promise to another replica. Does nothing if it has none."""
        reservation = self._reservations.get(request_id)
        if reservation is not None:
            self.reserve(request_id, replica_id, reservation.num_blocks, reservation.num_tokens)

    def release(self, request_id: str) -> None:
        """Withdraw a request's promise. Idempotent."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            self._count(reservation, -1)

    def expect(
        self, prompt: PromptKey, replica_id: str, block_hashes: Sequence[BlockHash], num_matched_blocks: int = 0
    ) -> None:
        """A prompt is on its way to ``replica_id``: until ``computed``, its blocks count as cached there, because later
        requests will find them. The first ``num_matched_blocks`` count already; they are marked as used.
        """
        self.computed(prompt)
        if block_hashes and replica_id in self._place_of:
            rest = self.index.expect(replica_id, block_hashes, num_matched_blocks)
            self._in_flight.add(prompt, replica_id, rest)

    def forget_foreign(self, replica_id: str) -> None:
        """Forget other gateways' prompts that are not computed yet at ``replica_id``."""
        for prompt in self._in_flight.of_others(replica_id):
            self.computed(prompt)

    def computed(self, prompt: PromptKey) -> None:
        """A prompt is computed, or never will be: only what its replica reports as cached counts now. Idempotent."""
        expected = self._in_flight.remove(prompt)
        if expected is not None:
            place, block_hashes = self._place_of[expected[0]], expected[1]
            slot: int = self._matches.slots.item(place)
            self.index.expected.remove(slot, block_hashes)

    def settle(self, request_ids: Iterable[str]) -> None:
        """The replica's own stats count these requests from now on, so their promises end. Idempotent."""
        for request_id in request_ids:
            self.release(request_id)

    def set_foreign(self, replica_id: str, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        """Set what other gateways have promised on ``replica_id``, as it reports; counted beside our own promises."""
        place, foreign = self._place_of.get(replica_id), (num_requests, num_blocks, num_tokens)
        if place is not None and foreign != self._foreign[place]:
            before, self._foreign[place] = self._foreign[place], foreign
            self._promise(place, *(new - old for new, old in zip(foreign, before, strict=True)))

    def set_wishes(self, replica_id: str, wishes: Sequence[Wish]) -> None:
        """Set what other gateways intend to send to ``replica_id``, as it reports; due dates are on our clock."""
        if replica_id in self._place_of or not wishes:
            self._wishes.set(replica_id, wishes)

    def wishes(self, now: float) -> Sequence[PlacedWish]:
        """What other gateways intend to send, the most urgent first; see ``Wish``."""
        return self._wishes.in_order(self._place_of, now)

    def reservation(self, request_id: str) -> Reservation | None:
        """The promise that a request has, if any."""
        return self._reservations.get(request_id)

    def candidates(self, block_hashes: Sequence[BlockHash], now: float) -> Candidates:
        """A snapshot of all members for one prompt. ``block_hashes`` may be empty."""
        present = self.present(now)
        self._is_told_shared = self._is_promised_shared = True
        return present.matching(self.match(block_hashes)) if block_hashes else present

    def present(self, now: float) -> Candidates:
        """``candidates`` for no prompt, valid only until the view changes."""
        if self._present is None or self._present.now != now:
            self._present = Candidates(
                self._replica_ids,
                self._node_ids,
                self._stats,
                self._states,
                self._columns,
                now,
                self._updated_s,
                self._nothing,
                self._shared_told,
            )
        return self._present

    def replicas_for(self, block_hashes: Sequence[BlockHash], now: float) -> tuple[ReplicaView, ...]:
        """``candidates`` as rows."""
        return self.candidates(block_hashes, now).views()

    def check_invariants(self) -> None:
        """Promises add up and are on members only, columns agree with the stats, the index knows just the members."""
        self.index.check_invariants()
        sums = np.array(self._foreign, np.int64).reshape(-1, len(PROMISED)).T
        for reservation in self._reservations.values():
            sums[:, self._place_of[reservation.replica_id]] += (1, reservation.num_blocks, reservation.num_tokens)
        for place, promised in enumerate(sums.T):
            assert tuple(self._columns[:, place]) == column(self._rows[place], promised)
            assert self._told[place].item() == self._rows[place]
        assert list(self._place_of.items()) == [(r, place) for place, r in enumerate(sorted(self._replica_ids))]
        for stats, row, state in zip(self._stats, self._rows, self._states, strict=True):
            assert row == told_row(stats, state)
            assert not state.connected or stats is not None
        assert self.index.replica_ids() == self._place_of.keys()
        for replica_id in self._replica_ids:
            num_expected = self.index.expected.num_held(self.index.slot(replica_id))
            assert num_expected == len(self._in_flight.blocks_at(replica_id))

    def match(self, block_hashes: Sequence[BlockHash]) -> Ints:
        """Leading blocks of a prompt that each member caches [n]."""
        return self._matches.of(self.index, block_hashes)

    def _take(self, place: int, stats: ReplicaStats | None, now: float) -> None:
        self._own_told()
        if stats is not None:
            self._stats[place] = stats
            if (row := told_row(stats, self._states[place])) != self._rows[place]:
                self._told[place] = self._rows[place] = row
                self._tell(place, row)
        self._updated_s[place] = now

    def _change(self, replica_id: str, **changes: Any) -> None:
        if (place := self._place_of.get(replica_id)) is not None:
            self._mark(place, self._states[place]._replace(**changes))

    def _mark(self, place: int, state: ReplicaState) -> None:
        if state == self._states[place]:
            return
        self._own_told()
        self._states = with_item(self._states, place, state)
        self._told[place] = self._rows[place] = told_row(self._stats[place], state)
        self._tell(place, self._rows[place])  # at once: ``_take`` will not, if the next stats give the same row

    def _tell(self, place: int, row: Sequence[Any]) -> None:
        """A replica's row of ``_told`` has changed to ``row``."""
        self._own_promised()
        self._columns[:, place] = column(row, self._columns[: len(PROMISED), place].tolist())

    def _count(self, reservation: Reservation, sign: int) -> None:
        place = self._place_of[reservation.replica_id]
        self._promise(place, sign, sign * reservation.num_blocks, sign * reservation.num_tokens)

    def _promise(self, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        self._own_promised()
        promise(self._columns, place, num_requests, num_blocks, num_tokens)

    def _own_told(self) -> None:
        """Call before a replica's report or its time changes."""
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

    def _set_members(self, replica_ids: Iterable[str]) -> None:
        """Rebuild the columns for ``replica_ids``; members that stay keep what is known of them."""
        members = tuple(sorted(replica_ids))
        places = [self._place_of.get(replica_id) for replica_id in members]  # where each was; None for one that is new

        def carried(values: Sequence[Item], default: Item) -> list[Item]:
            return [default if place is None else values[place] for place in places]

        columns = unknown_columns(len(members))
        for new, old in enumerate(places):
            if old is not None:
                columns[:, new] = self._columns[:, old]
        self._columns = columns
        self._stats = carried(self._stats, None)
        self._states = tuple(carried(self._states, UNKNOWN))
        self._rows = carried(self._rows, told_row(None, UNKNOWN))
        self._told = np.array(self._rows, TOLD)
        self._updated_s = np.array(carried(self._updated_s.tolist(), np.inf))
        self._foreign, self._node_ids = carried(self._foreign, (0, 0, 0)), tuple(carried(self._node_ids, ""))
        self._is_told_shared = self._is_promised_shared = False
        self._shared_told, self._present = SharedTold(self._told), None
        self._nothing, self._replica_ids = np.zeros(len(members), np.int64), members
        self._place_of = {replica_id: place for place, replica_id in enumerate(members)}
        self._matches.set_members(self.index, members)
