"""What this gateway has sent to replicas, and where a Serve call that follows a request must go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteRecord
from shoal_cluster.serve.feed_messages import Refused
from shoal_replica.request import TokenDelta


@dataclass(frozen=True, slots=True)
class Follower:
    """Callbacks for what becomes of a placed request.

    Attributes:
        on_routed: it is on its way to this replica, or (True) the replica has taken it.
        on_delta: this replica has computed tokens.
        on_refused: this replica does not run it after all.
        on_lost: the replica's feed has broken.
    """

    on_routed: Callable[[str, bool], None]
    on_delta: Callable[[str, TokenDelta], None]
    on_refused: Callable[[str, Refused], None]
    on_lost: Callable[[], None]


class SentRequests:
    """The requests that are on their way or at a replica. Owner: the gateway's ledger.

    Attributes:
        records: why each request was sent where it was.
    """

    def __init__(self) -> None:
        self.records: dict[str, RouteRecord] = {}
        self._ranked: set[str] = set()  # those whose ranking Serve has been given
        self._submitted: dict[str, str] = {}  # the replica on whose feed each request was submitted

    def submit(self, request_id: str, replica_id: str) -> None:
        """Note that a request was submitted on that replica's feed."""
        self._submitted[request_id] = replica_id

    def replica_of(self, request_id: str) -> str | None:
        """The replica on whose feed the request was submitted."""
        return self._submitted.get(request_id)

    def ranks(self, request_id: str, decide: Callable[[RouteQuery], RouteDecision]) -> tuple[str, ...]:
        """Where the call must go, best first: to the replica that has the request, else as decided. When Serve asks
        again because no replica took the call, a new decision is made.
        """
        if (replica_id := self._submitted.get(request_id)) is not None:
            return (replica_id,)
        if (record := self.records.get(request_id)) is None:
            return ()
        if request_id in self._ranked:
            return decide(record.query.anew()).ranked
        self._ranked.add(request_id)
        return record.decision.ranked

    def forget(self, request_id: str) -> None:
        """Forget a request that is over at this gateway."""
        self.records.pop(request_id, None)
        self._ranked.discard(request_id)
        self._submitted.pop(request_id, None)
