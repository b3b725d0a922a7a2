"""The gateway's dated copy of every replica's ledger: what it was told, plus what it has promised since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_cluster.policies.prefix_index import DEFAULT_MAX_ENTRIES, PrefixIndex
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.stats import ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as a policy sees it: a row of a snapshot.

    Attributes:
        replica_id: owner Ray Serve; true as of its last replica set.
        stats: owner the replica; ``age_s`` old. None until its feed has spoken.
        age_s: seconds since the gateway received ``stats``; 0 while there are none.
        connected: owner the gateway; whether the feed is up now.
        num_reserved, num_reserved_blocks, num_reserved_tokens: owner the gateway, exact: requests it has sent here
            that ``stats`` does not count yet, their blocks, and their prompt tokens to compute.
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room promised to a request on a replica, until the replica counts the request itself."""

    replica_id: str
    num_blocks: int
    num_tokens: int
    time_s: float


@dataclass(slots=True)
class _Ledger:
    """What the view keeps of one replica."""

    node_id: str
    stats: ReplicaStats | None = None
    updated_s: float = 0.0
    connected: bool = False
    num_reserved: int = 0
    num_reserved_blocks: int = 0
    num_reserved_tokens: int = 0

    def count(self, reservation: Reservation, sign: int) -> None:
        self.num_reserved += sign
        self.num_reserved_blocks += sign * reservation.num_blocks
        self.num_reserved_tokens += sign * reservation.num_tokens


class ClusterView:
    """Every replica's ledger in one place; owner and only writer is the gateway.

    Membership comes from Ray Serve (``join``, ``leave``), ledgers from the feeds (``apply_snapshot``, then
    ``apply_update`` for each later message, ``disconnect`` when a feed ends), reservations from routing.
    ``now`` is the gateway's monotonic clock, seconds. News of a replica that is not a member is dropped: a feed's
    last words may arrive after the replica has left.
    """

    def __init__(self, max_index_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._ledgers: dict[str, _Ledger] = {}
        self._reservations: dict[str, Reservation] = {}
        self.index = PrefixIndex(max_index_entries)

    def __len__(self) -> int:
        return len(self._ledgers)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._ledgers

    def is_connected(self, replica_id: str) -> bool:
        """Whether it is a member whose feed is open."""
        ledger = self._ledgers.get(replica_id)
        return ledger is not None and ledger.connected

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Members, sorted."""
        return tuple(sorted(self._ledgers))

    def join(self, replica_id: str, node_id: str = "") -> None:
        """A replica exists. It cannot be routed to before its first snapshot. Joining twice is once."""
        ledger = self._ledgers.setdefault(replica_id, _Ledger(node_id))
        ledger.node_id = node_id or ledger.node_id

    def leave(self, replica_id: str) -> None:
        """A replica is gone: forget its blocks, its stats and what was promised on it. Idempotent."""
        if self._ledgers.pop(replica_id, None) is None:
            return
        self.index.drop(replica_id)
        for request_id in [i for i, r in self._reservations.items() if r.replica_id == replica_id]:
            del self._reservations[request_id]

    def apply_snapshot(
        self, replica_id: str, stats: ReplicaStats, block_hashes: Iterable[BlockHash], now: float
    ) -> bool:
        """Take a replica's whole ledger. False if it is not a member."""
        ledger = self._ledgers.get(replica_id)
        if ledger is None:
            return False
        self.index.replace(replica_id, block_hashes)
        ledger.stats, ledger.updated_s, ledger.connected = stats, now, True
        return True

    def apply_update(
        self,
        replica_id: str,
        stats: ReplicaStats,
        stored: Iterable[BlockHash],
        removed: Iterable[BlockHash],
        now: float,
    ) -> bool:
        """Take the changes since the last message. False if the view needs a snapshot first (or knows no such member).

        ``removed`` applies before ``stored``: the events are net, no hash is in both.
        """
        ledger = self._ledgers.get(replica_id)
        if ledger is None or not ledger.connected:
            return False
        self.index.remove(replica_id, removed)
        self.index.store(replica_id, stored)
        ledger.stats, ledger.updated_s = stats, now
        return True

    def disconnect(self, replica_id: str) -> None:
        """A replica's feed ended: it takes no new request until the next snapshot. Its last ledger stays to be seen."""
        ledger = self._ledgers.get(replica_id)
        if ledger is not None:
            ledger.connected = False

    def reserve(
        self,
        request_id: str,
        replica_id: str,
        num_blocks: int,
        num_tokens: int,
        now: float,
        block_hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Promise room on ``replica_id``; a request's earlier promise is taken back. Marks ``block_hashes`` as used.

        Args:
            num_blocks: blocks the request will take from the free ones.
            num_tokens: prompt tokens it will make the replica compute.
        """
        self.release(request_id)
        self.index.touch(block_hashes)
        ledger = self._ledgers.get(replica_id)
        if ledger is None:
            return
        reservation = Reservation(replica_id, num_blocks, num_tokens, now)
        self._reservations[request_id] = reservation
        ledger.count(reservation, +1)

    def move(self, request_id: str, replica_id: str, now: float) -> None:
        """Carry a request's promise to another replica. Nothing happens if it has none."""
        held = self._reservations.get(request_id)
        if held is not None:
            self.reserve(request_id, replica_id, held.num_blocks, held.num_tokens, now)

    def release(self, request_id: str) -> None:
        """Take a request's promise back. Idempotent."""
        held = self._reservations.pop(request_id, None)
        if held is not None:
            self._ledgers[held.replica_id].count(held, -1)

    def settle(self, request_ids: Iterable[str]) -> None:
        """The replica's own stats count these requests from now on, so their promises end. Idempotent."""
        for request_id in request_ids:
            self.release(request_id)

    def reservation(self, request_id: str) -> Reservation | None:
        """The promise a request holds, if any."""
        return self._reservations.get(request_id)

    def replicas_for(self, block_hashes: Sequence[BlockHash], now: float) -> tuple[ReplicaView, ...]:
        """A snapshot for one prompt: every member, sorted by id. ``block_hashes`` may be empty."""
        matched = self.index.match(block_hashes)
        return tuple(
            ReplicaView(
                replica_id=replica_id,
                stats=ledger.stats,
                age_s=0.0 if ledger.stats is None else max(0.0, now - ledger.updated_s),
                connected=ledger.connected,
                num_reserved=ledger.num_reserved,
                num_reserved_blocks=ledger.num_reserved_blocks,
                num_reserved_tokens=ledger.num_reserved_tokens,
                num_matched_blocks=matched.get(replica_id, 0),
                node_id=ledger.node_id,
            )
            for replica_id, ledger in sorted(self._ledgers.items())
        )

    def check_invariants(self) -> None:
        """Sums of promises are true, none is on a stranger, the index knows members only."""
        self.index.check_invariants()
        sums = {replica_id: [0, 0, 0] for replica_id in self._ledgers}
        for held in self._reservations.values():
            row = sums[held.replica_id]
            row[0] += 1
            row[1] += held.num_blocks
            row[2] += held.num_tokens
        for replica_id, ledger in self._ledgers.items():
            assert sums[replica_id] == [ledger.num_reserved, ledger.num_reserved_blocks, ledger.num_reserved_tokens]
            assert not ledger.connected or ledger.stats is not None
        assert self.index.replica_ids() <= self._ledgers.keys()
