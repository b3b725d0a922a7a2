"""What `shoal status` calls a replica's state."""

from __future__ import annotations

from io import StringIO

import pytest
from fixtures.fake_gateway import STATS
from msgspec import structs
from rich.console import Console

from shoal_cluster.commands.status import _table
from shoal_cluster.serve.rows import ClusterRow, ReplicaRow

DRAINING = structs.replace(STATS, draining=True)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (ReplicaRow(replica_id="one", stats=STATS, connected=True), "ready"),
        (ReplicaRow(replica_id="one", stats=STATS, connected=True, slowness=4.0), "slow x4"),
        (ReplicaRow(replica_id="one", stats=STATS, connected=True, role="decode"), "ready, decode"),
        (ReplicaRow(replica_id="one", stats=STATS, connected=True, stalled=True, slowness=4.0), "stalled"),
        (ReplicaRow(replica_id="one", stats=DRAINING, connected=True, stalled=True), "draining"),
        (ReplicaRow(replica_id="one", stats=STATS, stalled=True), "not connected"),
        (ReplicaRow(replica_id="one", connected=True), "silent"),
    ],
)
def test_the_worst_is_said_in_eighty_columns(row: ReplicaRow, state: str) -> None:
    console = Console(width=80, record=True, file=StringIO())
    many = structs.replace(STATS, num_total_blocks=204_800, num_free_blocks=204_000, num_cached_blocks=100_000)
    other = ReplicaRow(replica_id="a2345678", stats=many, connected=True, age_s=60.0)
    console.print(_table(ClusterRow(model="m", replicas=(row, other))))
    lines = console.export_text().splitlines()
    assert any(line.split()[0] == "one" and f" {state} " in line for line in lines if line.split())
    assert "…" not in console.export_text()
