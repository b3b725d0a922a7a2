"""What gateways tell each other through the replicas: what each has promised, plans to send and has sent."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.feed_messages import Snapshot, ToldWish, Update


class SharedCredit:
    """One gateway's part of that. A gateway that is the only one tells nothing.

    Args:
        view: its reservations are the promises; takes what the other gateways tell.
        feeds: to the replicas, by id; the ledger's own mapping.
    """

    def __init__(self, view: ClusterView, feeds: Mapping[str, FeedClient], is_one_of_many: bool) -> None:
        self._view = view
        self._feeds = feeds
        self._is_one_of_many = is_one_of_many
        self._told: dict[str, tuple[Wish, ...]] = {}  # wishes as last told, by replica

    def promise(self, request_id: str) -> None:
        """Tell what this gateway has reserved for a request."""
        reservation = self._view.reservation(request_id) if self._is_one_of_many else None
        if reservation is not None and (feed := self._feeds.get(reservation.replica_id)) is not None:
            feed.promise(request_id, reservation.num_blocks, reservation.num_tokens)

    def withdraw(self, request_id: str, replica_id: str = "") -> None:
        """Withdraw a promise that is about to end, or to move to ``replica_id``."""
        reservation = self._view.reservation(request_id) if self._is_one_of_many else None
        if (
            reservation is not None
            and reservation.replica_id != replica_id
            and (feed := self._feeds.get(reservation.replica_id))
        ):
            feed.withdraw(request_id)

    def end(self, request_id: str, replica_id: str) -> None:
        """Withdraw again for a request that is over: a promise that came after it would stay for ever."""
        if self._is_one_of_many and (feed := self._feeds.get(replica_id)) is not None:
            feed.withdraw(request_id)

    def wish(self, wishes: Mapping[str, tuple[Wish, ...]], now: float) -> None:
        """Tell what this gateway plans to send, by replica, where that has changed."""
        if not self._is_one_of_many:
            return
        told = {}
        for replica_id in {**self._told, **wishes}:
            of_it = wishes.get(replica_id, ())
            if (feed := self._feeds.get(replica_id)) is None:
                continue
            told[replica_id] = of_it
            if of_it != self._told.get(replica_id, ()):
                feed.wish(tuple(ToldWish.at(wish, now) for wish in of_it))
        self._told = {replica_id: of_it for replica_id, of_it in told.items() if of_it}

    def take(self, replica_id: str, message: Snapshot | Update, now: float) -> None:
        """Take in what a replica passes on from the other gateways."""
        promised = message.promised
        self._view.set_foreign(replica_id, promised.num_requests, promised.num_blocks, promised.num_tokens)
        if isinstance(message, Snapshot):
            self._told.pop(replica_id, None)  # a new feed knows nothing
            self._view.forget_foreign(replica_id)
        else:
            for request_id in message.landed:
                self._view.computed((replica_id, request_id))
        for prompt in message.in_flight:
            self._view.expect((replica_id, prompt.request_id), replica_id, prompt.block_hashes)
        if message.wishes is not None:
            self._view.set_wishes(replica_id, [told.wish(now) for told in message.wishes])
