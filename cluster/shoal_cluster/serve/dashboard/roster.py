"""Every replica with its state: those that this gateway follows, and those that only Serve knows of."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.serve.deployment_watch import DeploymentRow, ServeReplica
from shoal_cluster.serve.replica_state import State, state_of
from shoal_cluster.serve.rows import ReplicaRow


@dataclass(frozen=True, slots=True)
class Card:
    """One replica. ``row`` has only ids if just Serve knows of the replica; ``started_s`` is Unix time, None if Serve
    does not tell.
    """

    row: ReplicaRow
    state: State
    started_s: float | None


_ORDER = {state: place for place, state in enumerate(State)}
_STARTING = ("STARTING", "RECOVERING", "UPDATING")


def roster(rows: tuple[ReplicaRow, ...], deployment: DeploymentRow | None) -> list[Card]:
    """Cards of all replicas: those in trouble first, then by id."""
    by_serve = {replica.replica_id: replica for replica in deployment.replicas} if deployment is not None else {}
    cards = [_followed(row, by_serve.pop(row.replica_id, None)) for row in rows]
    for replica in by_serve.values():
        if replica.state == "RUNNING":
            continue  # the routers have not been told of it yet, or this gateway has dropped it before Serve
        state = State.STARTING if replica.state in _STARTING else State.DRAINING
        cards.append(Card(ReplicaRow(replica_id=replica.replica_id, node_id=replica.node_id), state, replica.started_s))
    return sorted(cards, key=lambda card: (_ORDER[card.state], card.row.replica_id))


def _followed(row: ReplicaRow, by_serve: ServeReplica | None) -> Card:
    return Card(row, state_of(row), None if by_serve is None else by_serve.started_s)
