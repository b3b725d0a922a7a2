"""Where the replica to which a request goes may fetch cached blocks that it does not have itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from shoal_cluster.policies.block_offer import best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve.feed_messages import BlockSource
from shoal_cluster.serve.request_id import call_of, is_later_leg

KEPT_S = 60.0  # a request that has left a replica finds another within this time, or no blocks
ALL = sys.maxsize  # of a call's blocks: those of the answer that are full by then, too

Address = tuple[str, int]


class _Left(NamedTuple):
    """When a call left a replica, which still has so many of its leading blocks."""

    time_s: float
    address: Address
    num_blocks: int


class BlockSources:
    """Knows which replicas give blocks, and which of them calls have left that go on elsewhere. Owner: the gateway's
    ledger.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, Address] = {}  # of replicas whose feeds are followed, members or not
        self._left: dict[str, _Left] = {}  # by call, the newest last

    def __iter__(self) -> Iterator[str]:
        """The replicas that give blocks."""
        return iter(self._addresses)

    def join(self, replica_id: str, address: Address | None) -> None:
        """A replica is a member now; None: it gives no blocks."""
        if address is None:
            self._addresses.pop(replica_id, None)
        else:
            self._addresses[replica_id] = address

    def leave(self, replica_id: str) -> None:
        """A replica is neither a member any more nor followed."""
        self._addresses.pop(replica_id, None)

    def note_left(self, call_id: str, replica_id: str, num_blocks: int, now: float) -> None:
        """A call goes on elsewhere; the replica still has so many of its leading blocks."""
        self._left.pop(call_id, None)  # it is the newest now
        if (address := self._addresses.get(replica_id)) is not None:
            self._left[call_id] = _Left(now, address, num_blocks)

    def forget_old(self, now: float) -> None:
        """Forget what calls left longer ago than replicas can be trusted to keep it."""
        for call_id in [*takewhile(lambda call: now - self._left[call].time_s >= KEPT_S, self._left)]:
            del self._left[call_id]

    def with_blocks(self, query: RouteQuery) -> RouteQuery:
        """The query of a later leg. Blocks that the call's former replica still has will be fetched from there, so they
        do not count as prompt tokens to compute.
        """
        left = self._left.get(call_of(query.request_id))
        return query if left is None else query.with_blocks_given(min(left.num_blocks, len(query.block_hashes)))

    def of(self, query: RouteQuery, candidates: Candidates, replica_id: str) -> BlockSource | None:
        """Where that replica may fetch more of the request's blocks than it has."""
        left = self._left.get(call_of(query.request_id)) if is_later_leg(query.request_id) else None
        if left is not None and left.address != self._addresses.get(replica_id):
            return BlockSource(*left.address, min(left.num_blocks, len(query.block_hashes)))
        offer = best_offer(candidates, replica_id)
        address = None if offer is None else self._addresses.get(offer.replica_id)
        return None if offer is None or address is None else BlockSource(*address, offer.num_blocks)
