"""Every replica with its state: those that this gateway follows, and those that only Serve knows of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_cluster.serve.deployment_watch import DeploymentRow, ServeReplica
from shoal_cluster.serve.rows import ReplicaRow


class State(StrEnum):
    """A replica's state, in the order that cards are sorted by: worst first."""

    LOST = "not connected"
    STALLED = "stalled"
    SILENT = "silent"
    DRAINING = "draining"
    STARTING = "starting"
    READY = "ready"


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
    if row.stats is None:
        state = State.SILENT
    elif not row.connected:
        state = State.LOST
    elif row.stats.draining:
        state = State.DRAINING
    else:
        state = State.STALLED if row.stalled else State.READY
    return Card(row, state, None if by_serve is None else by_serve.started_s)
