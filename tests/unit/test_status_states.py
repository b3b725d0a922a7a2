"""What `shoal status` calls a replica's state; and its watch."""

from __future__ import annotations

import asyncio
from io import StringIO
from typing import Self

import pytest
from fixtures.fake_gateway import STATS
from msgspec import structs
from rich.console import Console

from shoal_cluster.commands import client, status
from shoal_cluster.commands.status import _table
from shoal_cluster.serve.rows import ClusterRow, ReplicaRow
from shoal_replica.errors import DeadlineExceeded, ShoalError, Unavailable

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


def test_a_watch_goes_on_while_the_gateway_is_away_or_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles: list[ShoalError | None] = [None, Unavailable("it is away"), DeadlineExceeded("it stalls"), None]

    class Client:
        def __init__(self, address: str) -> None:
            pass

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *args: object) -> None:
            pass

        async def cluster(self) -> ClusterRow:
            if not troubles:
                raise KeyboardInterrupt
            if (trouble := troubles.pop(0)) is not None:
                raise trouble
            return ClusterRow(model="m", replicas=())

    monkeypatch.setattr(client, "GatewayClient", Client)
    monkeypatch.setattr(status, "WATCH_PERIOD_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(status._watch("127.0.0.1:9000", False))
    assert troubles == []
