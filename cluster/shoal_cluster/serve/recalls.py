"""Asks requests back before they start: from replicas that leave, that drain, or that have stalled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Set

from shoal_cluster.policies.stall import Stalls
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.journal import EventKind, Journal
from shoal_cluster.serve.sent_requests import SentRequest, SentRequests
from shoal_replica.stats import ReplicaStats

LOOK_EVERY_S = 0.2


class Recalls:
    """Owner: the gateway's ledger.

    Args:
        feeds: the ledger's own, by replica id.
        can_place: whether a replica other than the given ones takes requests.

    Attributes:
        stalls: which replicas have stalled; gets its news through this object.
        on_stall: called when a replica has stalled.
    """

    def __init__(
        self,
        view: ClusterView,
        feeds: Mapping[str, FeedClient],
        sent: SentRequests,
        can_place: Callable[[Set[str]], bool],
        journal: Journal,
    ) -> None:
        self.stalls = Stalls(view)
        self.on_stall: Callable[[], None] = lambda: None
        self._feeds = feeds
        self._sent = sent
        self._can_place = can_place
        self._journal = journal
        self._asked: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def hear(self, replica_id: str, stats: ReplicaStats | None, now: float) -> None:
        """Take news of a replica; ``stats`` is None if they have not changed."""
        if self._timer is None and not self._is_closed:
            self._look_again()
        if self.stalls.hear(replica_id, stats, now):
            self._note_release(replica_id)

    def begin(self, replica_id: str, stats: ReplicaStats, now: float) -> None:
        """Take a replica's first news, or its first after its feed broke."""
        self.stalls.forget(replica_id)
        self.hear(replica_id, stats, now)

    def look(self, now: float) -> None:
        """Look for replicas that have stalled, and ask back what waits there."""
        found, released = self.stalls.look(now)
        for replica_id in released:
            self._note_release(replica_id)
        for replica_id, reason in found:
            self.on_stall()
            num_asked = self.recall(replica_id)
            text = f"{reason}: nothing new goes there; {num_asked} requests asked back"
            self._journal.note(EventKind.LOST, text, replica_id=replica_id)

    def recall(self, replica_id: str) -> int:
        """Ask a replica that gets nothing new for what waits there and has not started, if it can go elsewhere. Returns
        how many requests were asked back.
        """
        if (feed := self._feeds.get(replica_id)) is None or not self._can_place({replica_id}):
            return 0
        there = [(request_id, sent) for request_id, sent in self._sent.at(replica_id) if request_id not in self._asked]
        request_ids = [request_id for request_id, sent in there if self._can_move(sent, replica_id)]
        for request_id in request_ids:
            self._asked.add(request_id)
            feed.recall(request_id)
        return len(request_ids)

    def _can_move(self, sent: SentRequest, replica_id: str) -> bool:
        """Whether a request has another replica to go to: one that takes requests and has not refused it or handed it
        back before.
        """
        record = sent.record
        return record is None or not record.query.excluded or self._can_place(record.query.excluded | {replica_id})

    def forget(self, request_id: str) -> None:
        """Forget a request that is over at this gateway."""
        self._asked.discard(request_id)

    def close(self) -> None:
        """Stop looking."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        """Look periodically: replicas that are all silent bring no news to look at."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_again)
        self.look(time.monotonic())

    def _note_release(self, replica_id: str) -> None:
        self._journal.note(EventKind.READY, "it gets on: requests may go there again", replica_id=replica_id)
