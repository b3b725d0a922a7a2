"""Running requests leave replicas that drain: they go on elsewhere, with their cached blocks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.block_offer import best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, OPEN_SLOTS, ROOM
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteRecord
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.feed_messages import BlockSource
from shoal_cluster.serve.request_id import call_of, is_later_leg

LOOK_S = 0.1  # how often a few requests are moved: those before have arrived by then, and count where they went
MAX_AT_ONCE = 4
KEPT_S = 60.0  # a request that has left a replica finds another within this time, or no blocks

Address = tuple[str, int]
ALL = sys.maxsize  # of its blocks: those of the answer that are full by then, too


class _Left(NamedTuple):
    """When a call left a replica, which still has so many of its leading blocks."""

    time_s: float
    address: Address
    num_blocks: int


class Moves:
    """Asks draining replicas to hand back running requests, a few at a time, as far as others have room; and knows
    where blocks can be fetched, among them those of requests that have moved. Owner: the gateway's ledger.

    Args:
        feeds, replica_of, dispatched: the ledger's own: feeds by replica id; the replica of each request, by its id;
            and its routing record.
    """

    def __init__(
        self,
        view: ClusterView,
        feeds: Mapping[str, FeedClient],
        replica_of: Mapping[str, str],
        dispatched: Mapping[str, RouteRecord],
    ) -> None:
        self._view = view
        self._feeds = feeds
        self._replica_of = replica_of
        self._dispatched = dispatched
        self._addresses: dict[str, Address] = {}  # of replicas whose feeds are followed, members or not
        self._asked: set[str] = set()
        self._left: dict[str, _Left] = {}  # by call
        self._next_s = 0.0

    def join(self, replica_id: str, blocks_address: Address | None) -> None:
        """A replica is a member now; None: it gives no blocks."""
        if blocks_address is None:
            self._addresses.pop(replica_id, None)
        else:
            self._addresses[replica_id] = blocks_address

    def leave(self, replica_id: str) -> None:
        """A replica is neither a member any more nor followed."""
        self._addresses.pop(replica_id, None)

    def forget(self, request_id: str) -> None:
        """Forget a request that is over at its replica."""
        self._asked.discard(request_id)

    def look(self, now: float) -> None:
        """Ask replicas that drain, or that Serve stops, for a few of their requests, as far as others have room now.
        Where no blocks can be fetched, requests stay: elsewhere all would have to be computed again.
        """
        if now < self._next_s:
            return
        self._next_s = now + LOOK_S
        self._forget_left(now)
        cluster = self._view.present(now)
        for replica_id in [r for r in self._addresses if self._drains(r, cluster)]:
            self._move_some(replica_id, cluster, now)

    def note_left(self, call_id: str, replica_id: str, num_blocks: int, now: float) -> None:
        """A call goes on elsewhere; the replica still has so many of its leading blocks."""
        self._left.pop(call_id, None)  # it is the newest now
        if (address := self._addresses.get(replica_id)) is not None:
            self._left[call_id] = _Left(now, address, num_blocks)

    def with_blocks(self, query: RouteQuery) -> RouteQuery:
        """The query of a later leg. Blocks that the call's former replica still has will be fetched from there, so they
        do not count as prompt tokens to compute.
        """
        left = self._left.get(call_of(query.request_id))
        return query if left is None else query.with_blocks_given(min(left.num_blocks, len(query.block_hashes)))

    def source(self, query: RouteQuery, candidates: Candidates, replica_id: str) -> BlockSource | None:
        """Where the replica to which a request goes may fetch more of its blocks than it has."""
        left = self._left.get(call_of(query.request_id)) if is_later_leg(query.request_id) else None
        if left is not None and left.address != self._addresses.get(replica_id):
            return BlockSource(*left.address, min(left.num_blocks, len(query.block_hashes)))
        offer = best_offer(candidates, replica_id)
        address = None if offer is None else self._addresses.get(offer.replica_id)
        return None if offer is None or address is None else BlockSource(*address, offer.num_blocks)

    def _forget_left(self, now: float) -> None:
        for call_id in [*takewhile(lambda call: now - self._left[call].time_s >= KEPT_S, self._left)]:
            del self._left[call_id]

    def _drains(self, replica_id: str, cluster: Candidates) -> bool:
        if replica_id not in self._view:
            return True
        stats = cluster.stats[cluster.place(replica_id)]
        return stats is not None and stats.draining

    def _move_some(self, replica_id: str, cluster: Candidates, now: float) -> None:
        takes = cluster.columns[CAPACITY] >= 0
        room, slots = cluster.columns[ROOM] * takes, cluster.columns[OPEN_SLOTS] * takes
        feed, num_asked = self._feeds.get(replica_id), 0
        if feed is None or not feed.is_open:
            return
        for request_id in [r for r, where in self._replica_of.items() if where == replica_id and r not in self._asked]:
            if (record := self._dispatched.get(request_id)) is None:
                continue
            query = replace(record.query, phase="")  # it goes on anywhere
            num_blocks = query.num_blocks_needed + -(-query.decode_steps // query.block_size)
            fits = is_eligible(query, cluster) & (room >= num_blocks) & (slots >= 1)
            if not fits.any():
                continue
            place = int(np.where(fits, room, -1).argmax())
            room[place] -= num_blocks
            slots[place] -= 1
            self._asked.add(request_id)
            self.note_left(call_of(request_id), replica_id, ALL, now)
            feed.recall(request_id, also_started=True)
            num_asked += 1
            if num_asked == MAX_AT_ONCE:
                return
