"""Adapter from Serve's request router to the gateway's decisions: one replica per rank, best first."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica


class BlockRouter(RequestRouter):  # type: ignore[misc]
    """Holds no state. Serve runs a by-value copy of this module, so the ledger is imported where it is used."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from shoal_cluster.serve.installed_ledger import current, routed_model
        from shoal_cluster.serve.member import Member

        super().update_replicas(replicas)
        model = routed_model()
        members = [Member.of(r.replica_id.unique_id, r.node_id, r.replica_metadata, model) for r in replicas]
        current().set_members([member for member in members if member is not None])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        from shoal_cluster.serve.installed_ledger import current

        if pending_request is not None:  # else Serve asks again without a pause and starves this event loop
            pending_request.routing_context.should_backoff = True
        request_id = _request_id(pending_request)
        if request_id is None:
            return [[replica] for replica in candidate_replicas]
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = current().ranks(request_id)
        return [[candidates[replica_id]] for replica_id in ranked if replica_id in candidates]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        from shoal_cluster.serve.installed_ledger import current

        request_id = _request_id(pending_request)
        if request_id is not None:
            current().routed(request_id, replica_id.unique_id)


def _request_id(pending_request: PendingRequest | None) -> str | None:
    """The id of the Shoal request that a call carries; None for a call that carries none."""
    if pending_request is None or not pending_request.args:
        return None
    return getattr(pending_request.args[0], "request_id", None)
