"""The gateway's dated copy of every replica's ledger: what it was told, plus what it has promised since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Ints, Phase
from shoal_cluster.policies.in_flight import PromptKey, PromptsInFlight
from shoal_cluster.policies.matches import Matches
from shoal_cluster.policies.prefix_index import DEFAULT_MAX_ENTRIES, PrefixIndex
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.reservation import Reservation
from shoal_cluster.policies.view_columns import ViewColumns
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
        self._members = ViewColumns()
        self._matches = Matches()

    def __len__(self) -> int:
        return len(self.replica_ids)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._members.place_of

    def is_connected(self, replica_id: str) -> bool:
        """Whether ``replica_id`` is a member whose feed is open."""
        return (place := self._place(replica_id)) is not None and self._members.states[place].connected

    def is_stalled(self, replica_id: str) -> bool:
        """Whether ``replica_id`` is a member that is marked as stalled."""
        return (place := self._place(replica_id)) is not None and self._members.states[place].stalled

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Ids of the members, sorted."""
        return self._members.replica_ids

    def join(self, replica_id: str, node_id: str = "") -> None:
        """Add a member. Nothing is routed to it before its first snapshot. Idempotent."""
        self.join_all({replica_id: node_id})

    def join_all(self, node_ids: Mapping[str, str]) -> None:
        """``join`` members on these nodes, "" where that is not known, all at once."""
        if new := [replica_id for replica_id in node_ids if replica_id not in self]:
            self._set_members((*self.replica_ids, *new))
        for replica_id, node_id in node_ids.items():
            if node_id:
                self._members.set_node(self._members.place_of[replica_id], node_id)

    def leave(self, replica_id: str) -> None:
        """Remove a member: forget its blocks, its stats and what was promised on it. Idempotent."""
        if replica_id not in self:
            return
        for request_id in [i for i, r in self._reservations.items() if r.replica_id == replica_id]:
            self.release(request_id)
        self._in_flight.forget(replica_id)
        self._set_members(member for member in self.replica_ids if member != replica_id)
        self.index.drop(replica_id)
        self._wishes.set(replica_id, ())

    def apply_snapshot(
        self, replica_id: str, stats: ReplicaStats, block_hashes: Iterable[BlockHash], now: float
    ) -> bool:
        """Take a replica's complete ledger. False if it is not a member."""
        if (place := self._place(replica_id)) is None:
            return False
        self.index.replace(replica_id, block_hashes)
        self._members.mark(place, connected=True, stalled=False)
        self._members.hear(place, stats, now)
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
        place = self._place(replica_id)
        if place is None or not self._members.states[place].connected:
            return False
        if stored or removed:
            self.index.change(replica_id, stored, removed)
        self._members.hear(place, stats, now)
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
        for replica_id in self.replica_ids:
            self._change(replica_id, role=roles.get(replica_id, ""))
        self._set_members(self.replica_ids)

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
        if replica_id in self:
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
        if block_hashes and replica_id in self:
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
            place, block_hashes = self._members.place_of[expected[0]], expected[1]
            slot: int = self._matches.slots.item(place)
            self.index.expected.remove(slot, block_hashes)

    def settle(self, request_ids: Iterable[str]) -> None:
        """The replica's own stats count these requests from now on, so their promises end. Idempotent."""
        for request_id in request_ids:
            self.release(request_id)

    def set_foreign(self, replica_id: str, num_requests: int, num_blocks: int, num_tokens: int) -> None:
        """Set what other gateways have promised on ``replica_id``, as it reports; counted beside our own promises."""
        if (place := self._place(replica_id)) is not None:
            self._members.set_foreign(place, num_requests, num_blocks, num_tokens)

    def set_wishes(self, replica_id: str, wishes: Sequence[Wish]) -> None:
        """Set what other gateways intend to send to ``replica_id``, as it reports; due dates are on our clock."""
        if replica_id in self or not wishes:
            self._wishes.set(replica_id, wishes)

    def wishes(self, now: float) -> Sequence[PlacedWish]:
        """What other gateways intend to send, the most urgent first; see ``Wish``."""
        return self._wishes.in_order(self._members.place_of, now)

    def reservation(self, request_id: str) -> Reservation | None:
        """The promise that a request has, if any."""
        return self._reservations.get(request_id)

    def candidates(self, block_hashes: Sequence[BlockHash], now: float) -> Candidates:
        """A snapshot of all members for one prompt. ``block_hashes`` may be empty."""
        snapshot = self._members.snapshot(now)
        return snapshot.matching(self.match(block_hashes)) if block_hashes else snapshot

    def present(self, now: float) -> Candidates:
        """``candidates`` for no prompt, valid only until the view changes."""
        return self._members.present(now)

    def replicas_for(self, block_hashes: Sequence[BlockHash], now: float) -> tuple[ReplicaView, ...]:
        """``candidates`` as rows."""
        return self.candidates(block_hashes, now).views()

    def check_invariants(self) -> None:
        """Promises add up and are on members only, columns agree with the stats, the index knows just the members."""
        self.index.check_invariants()
        self._members.check_invariants(self._reservations.values())
        assert self.index.replica_ids() == set(self.replica_ids)
        for replica_id in self.replica_ids:
            num_expected = self.index.expected.num_held(self.index.slot(replica_id))
            assert num_expected == len(self._in_flight.blocks_at(replica_id))

    def match(self, block_hashes: Sequence[BlockHash]) -> Ints:
        """Leading blocks of a prompt that each member caches [n]."""
        return self._matches.of(self.index, block_hashes)

    def _change(self, replica_id: str, **changes: Any) -> None:
        if (place := self._place(replica_id)) is not None:
            self._members.mark(place, **changes)

    def _count(self, reservation: Reservation, sign: int) -> None:
        place = self._members.place_of[reservation.replica_id]
        self._members.promise(place, sign, sign * reservation.num_blocks, sign * reservation.num_tokens)

    def _place(self, replica_id: str) -> int | None:
        return self._members.place_of.get(replica_id)

    def _set_members(self, replica_ids: Iterable[str]) -> None:
        self._members.set_members(replica_ids)
        self._matches.set_members(self.index, self.replica_ids)
