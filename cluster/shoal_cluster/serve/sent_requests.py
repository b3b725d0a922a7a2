"""What this gateway has sent to replicas, who is told what becomes of it, and where a Serve call for it must go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.feed_messages import Refused
from shoal_cluster.serve.request_id import call_of
from shoal_replica.errors import InvalidArgument
from shoal_replica.request import TokenDelta

MAX_ENDED = 4096


class Follower:
    """Is told what becomes of a request. This one does not care."""

    def sent_to(self, replica_id: str) -> None:
        """It is on its way to that replica."""

    def taken_by(self, replica_id: str) -> None:
        """That replica has taken it."""

    def take(self, replica_id: str, delta: TokenDelta) -> None:
        """That replica has computed tokens."""

    def refused(self, replica_id: str, refused: Refused) -> None:
        """That replica does not run it after all."""

    def lost(self, replica_id: str) -> None:
        """The feed of that replica, which had it or was about to get it, has broken."""


@dataclass(slots=True)
class SentRequest:
    """A request that is about to be placed, on its way or at a replica.

    Attributes:
        record: why it was sent where it was; None before.
        replica_id: the replica that it is at, or was submitted to; empty before.
        submitted_to: the replica on whose feed it was submitted, if it was.
        is_ranked: Serve has been told where its call must go.
        withdraw_call: takes Serve's call back, while one has been made.
    """

    follower: Follower
    record: RouteRecord | None = None
    replica_id: str = ""
    submitted_to: str = ""
    is_ranked: bool = False
    withdraw_call: Callable[[], None] | None = None


class SentRequests:
    """All requests that somebody follows, by id. Owner: the gateway's ledger."""

    def __init__(self) -> None:
        self._requests: dict[str, SentRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # calls, of which messages may still be under way

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[tuple[str, SentRequest]]:
        return iter(self._requests.items())

    def follow(self, request_id: str, follower: Follower) -> None:
        """Raises InvalidArgument if a request with that id is followed already."""
        if request_id in self._requests:
            raise InvalidArgument("request_id", request_id, "must not be that of a running request")
        self._requests[request_id] = SentRequest(follower)

    def get(self, request_id: str) -> SentRequest | None:
        """None if nobody follows a request with that id."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> SentRequest | None:
        """Forget a request that is over at this gateway: all but its call's id, where a replica has had it."""
        if (sent := self._requests.pop(request_id, None)) is not None and sent.replica_id:
            call_id = call_of(request_id)
            self._ended[call_id] = None
            self._ended.move_to_end(call_id)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        return sent

    def has_ended(self, call_id: str) -> bool:
        """Whether it is one of the last ``MAX_ENDED`` calls that have ended at a replica, or left one."""
        return call_id in self._ended

    def at(self, replica_id: str) -> list[tuple[str, SentRequest]]:
        """The requests at a replica, or submitted to it, in the order in which they were followed."""
        return [(request_id, sent) for request_id, sent in self._requests.items() if sent.replica_id == replica_id]

    def ranks(
        self, request_id: str, members: Container[str], decide: Callable[[RouteQuery], RouteDecision]
    ) -> tuple[str, ...]:
        """Where Serve's call must go, best first: to the replica that has the request, else as decided. When Serve asks
        again because no replica took the call, a new decision is made. A call for a replica that is no member any more
        is withdrawn, as Serve would ask on and on, and let other calls wait: the request goes on there without one.
        """
        if (sent := self._requests.get(request_id)) is None:
            return ()
        if sent.submitted_to in members:
            return (sent.submitted_to,)
        if sent.submitted_to:
            if sent.withdraw_call is not None:
                sent.withdraw_call()
            return ()
        if sent.record is None:
            return ()
        if sent.is_ranked:
            return decide(sent.record.query.anew()).ranked
        sent.is_ranked = True
        return sent.record.decision.ranked
