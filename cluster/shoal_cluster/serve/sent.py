"""What this gateway has sent to replicas, and where Serve's call, which follows each request, is to go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal_cluster.policies.routing import RouteDecision, RouteQuery, RouteRecord
from shoal_replica.request import TokenDelta


@dataclass(frozen=True, slots=True)
class Follower:
    """Who wants to know what becomes of a placed request.

    Attributes:
        on_routed: it is on its way to this replica, or (True) the replica has taken it.
        on_delta: this replica has computed tokens.
        on_refused: this replica does not run it after all, why, and which field of it is wrong, if one is.
        on_lost: the replica's feed has broken.
    """

    on_routed: Callable[[str, bool], None]
    on_delta: Callable[[str, TokenDelta], None]
    on_refused: Callable[[str, str, str], None]
    on_lost: Callable[[], None]


class SentRequests:
    """Owner: the gateway's ledger.

    Attributes:
        records: why each request was sent where.
    """

    def __init__(self) -> None:
        self.records: dict[str, RouteRecord] = {}
        self._ranked: set[str] = set()  # of those, whose ranks Serve knows
        self._submitted: dict[str, str] = {}  # the replica that has the request by its feed

    def submit(self, request_id: str, replica_id: str) -> None:
        """A request has gone there by the feed."""
        self._submitted[request_id] = replica_id

    def replica_of(self, request_id: str) -> str | None:
        """The replica that has the request by its feed."""
        return self._submitted.get(request_id)

    def ranks(self, request_id: str, decide: Callable[[RouteQuery], RouteDecision]) -> tuple[str, ...]:
        """Where the call is to go, best first: to the replica that has the request, or by the decision. Asked again,
        for nobody took it, by a new one.
        """
        if (replica_id := self._submitted.get(request_id)) is not None:
            return (replica_id,)
        if (record := self.records.get(request_id)) is None:
            return ()
        if request_id in self._ranked:
            return decide(replace(record.query, passed=())).ranked  # of then
        self._ranked.add(request_id)
        return record.decision.ranked

    def forget(self, request_id: str) -> None:
        """The request is over here."""
        self.records.pop(request_id, None)
        self._ranked.discard(request_id)
        self._submitted.pop(request_id, None)
