"""Serve's door to ``route()``: one replica per rank, best first; blocks are reserved at the choice."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

FEED_KEY = "shoal_feed"


class BlockRouter(RequestRouter):  # type: ignore[misc]
    """Adapter only. Serve runs a by-value copy of this module, so the ledger is imported where it is used."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from shoal_cluster.serve.gateway_ledger import Member, current

        super().update_replicas(replicas)
        members = []
        for replica in replicas:
            address = replica.replica_metadata.get(FEED_KEY)
            if address is not None:
                members.append(Member(replica.replica_id.unique_id, replica.node_id, (address[0], address[1])))
        current().set_members(members)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        from shoal_cluster.serve.gateway_ledger import current

        if pending_request is not None:  # else Serve asks again at once, and this loop does nothing else any more
            pending_request.routing_context.should_backoff = True
        query = pending_request.kwargs.get("query") if pending_request is not None else None
        if query is None:
            return [[replica] for replica in candidate_replicas]
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        decision = current().decide(query)
        return [[candidates[replica_id]] for replica_id in decision.ranked if replica_id in candidates]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        from shoal_cluster.serve.gateway_ledger import current

        query: Any = pending_request.kwargs.get("query")
        if query is not None:
            current().routed(query, replica_id.unique_id)
