"""Running requests leave replicas that drain: they go on elsewhere, with their cached blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, OPEN_SLOTS, ROOM
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.serve.block_sources import ALL, BlockSources
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.request_id import call_of
from shoal_cluster.serve.sent_requests import SentRequests

LOOK_S = 0.1  # how often a few requests are moved: those before have arrived by then, and count where they went
MAX_AT_ONCE = 4


class Moves:
    """Asks draining replicas to hand back running requests, a few at a time, as far as others have room. Owner: the
    gateway's ledger.

    Args:
        feeds: the ledger's own, by replica id.
        sources: who gives blocks, and where those of the requests that move stay.
    """

    def __init__(
        self,
        view: ClusterView,
        feeds: Mapping[str, FeedClient],
        sent: SentRequests,
        sources: BlockSources,
    ) -> None:
        self._view = view
        self._feeds = feeds
        self._sent = sent
        self._sources = sources
        self._asked: set[str] = set()
        self._next_s = 0.0

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
        self._sources.forget_old(now)
        cluster = self._view.present(now)
        for replica_id in [r for r in self._sources if self._drains(r, cluster)]:
            self._move_some(replica_id, cluster, now)

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
        for request_id, sent in self._sent.at(replica_id):
            if sent.record is None or request_id in self._asked:
                continue
            query = replace(sent.record.query, phase="")  # it goes on anywhere
            num_blocks = query.num_blocks_needed + -(-query.decode_steps // query.block_size)
            fits = is_eligible(query, cluster) & (room >= num_blocks) & (slots >= 1)
            if not fits.any():
                continue
            place = int(np.where(fits, room, -1).argmax())
            room[place] -= num_blocks
            slots[place] -= 1
            self._asked.add(request_id)
            self._sources.note_left(call_of(request_id), replica_id, ALL, now)
            feed.recall(request_id, also_started=True)
            num_asked += 1
            if num_asked == MAX_AT_ONCE:
                return
