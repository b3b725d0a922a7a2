"""What a replica's state is called, wherever it is shown."""

from __future__ import annotations

from enum import StrEnum

from shoal_cluster.serve.rows import ReplicaRow


class State(StrEnum):
    """Worst first: the order in which replicas in trouble are listed."""

    LOST = "not connected"
    STALLED = "stalled"
    SILENT = "silent"
    DRAINING = "draining"
    STARTING = "starting"
    READY = "ready"


def state_of(row: ReplicaRow) -> State:
    """The state of a replica that has joined; it is silent until its first report."""
    if row.stats is None:
        return State.SILENT
    if not row.connected:
        return State.LOST
    if row.stats.draining:
        return State.DRAINING
    return State.STALLED if row.stalled else State.READY
