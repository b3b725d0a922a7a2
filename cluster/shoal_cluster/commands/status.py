"""``shoal status``: the block ledger of every replica, and the cluster's totals."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS
from shoal_replica.errors import DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shoal_cluster.serve.block_sums import BlockLedger
    from shoal_cluster.serve.rows import ClusterRow, ReplicaRow
    from shoal_replica.stats import ReplicaStats

WATCH_PERIOD_S = 1.0
COLUMNS = ("alloc", "cached", "free", "total", "used", "resv", "run", "wait", "hit", "age")


def status(
    address: Annotated[str, typer.Option(help="The gateway's gRPC address.")] = DEFAULT_GRPC_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    replicas: Annotated[bool, typer.Option("--replicas", help="Show each replica's memory use, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show each replica's KV blocks (allocated, cached, free, total, used, reserved) and the cluster's sums."""
    if watch and as_json:
        raise typer.BadParameter("--watch and --json cannot be combined")
    if watch:
        asyncio.run(_watch(address, replicas))
        return
    cluster = asyncio.run(_fetch(address))
    if as_json:
        typer.echo(json.dumps(_as_json(cluster), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_screen(cluster, replicas), soft_wrap=True)


async def _fetch(address: str) -> ClusterRow:
    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        return await client.cluster()


async def _watch(address: str, replicas: bool) -> None:
    from rich.live import Live

    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        shown: RenderableType = _screen(await client.cluster(), replicas)
        with Live(shown, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(WATCH_PERIOD_S)
                try:
                    shown = _screen(await client.cluster(), replicas)
                except (Unavailable, DeadlineExceeded) as error:  # the gateway may be being replaced, or stall
                    shown = f"{error}; trying again"
                live.update(shown, refresh=True)


def _screen(cluster: ClusterRow, replicas: bool) -> RenderableType:
    """All that is shown: ``replicas`` adds what each one's memory went to."""
    if not replicas:
        return _shown(cluster)
    from rich.console import Group
    from rich.text import Text

    rows = [f"{row.replica_id}  {row.start_report or 'has not said'}" for row in cluster.replicas]
    return Group(_shown(cluster), *map(Text, rows))


def _as_json(cluster: ClusterRow) -> dict[str, Any]:
    from shoal_cluster.serve.block_sums import sum_blocks

    ledger = sum_blocks(cluster.replicas)
    body: dict[str, Any] = msgspec.to_builtins(cluster)
    body["blocks"] = msgspec.to_builtins(ledger) | {"utilization": ledger.utilization}
    for row, replica in zip(cluster.replicas, body["replicas"], strict=True):
        if row.stats is not None:
            replica["stats"]["utilization"] = row.stats.utilization
    return body


def _shown(cluster: ClusterRow) -> RenderableType:
    """The replicas; and, where there are adapters, what is asked for."""
    from rich.console import Group

    return Group(_table(cluster), _models(cluster)) if len(cluster.models) > 1 else _table(cluster)


def _models(cluster: ClusterRow) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("model, adapters")
    for name in ("replicas", "requests", "prompt tokens", "cached", "output tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in cluster.models:
        hits = f"{row.num_cached_tokens / row.num_prompt_tokens:.0%}" if row.num_prompt_tokens else "-"
        counts = (row.num_replicas, row.num_requests, row.num_prompt_tokens, hits, row.num_output_tokens)
        table.add_row(row.name, *map(str, counts))
    return table


def _table(cluster: ClusterRow) -> Table:
    from rich import box
    from rich.table import Table

    from shoal_cluster.serve.block_sums import sum_blocks

    spoken = [row.stats for row in cluster.replicas if row.stats is not None]
    title = (
        f"{cluster.model}: {cluster.num_active} active of {cluster.num_requests} requests, {cluster.num_shed} shed, "
        f"{cluster.num_failed} failed, {cluster.num_resumes} resumed"
    )
    if (quality := cluster.quality).num_requests:
        title += (
            f"\nprefix hits: {quality.predicted_rate:.1%} predicted, {quality.actual_rate:.1%} found; "
            f"ledger age at decisions: p99 {1000 * quality.age_p99_s:.0f} ms"
        )
    if cluster.recent_ttft_s:
        recent = sorted(cluster.recent_ttft_s)
        p50, p99 = (recent[math.ceil(share * len(recent)) - 1] for share in (0.5, 0.99))
        title += f"\nfirst token, last {len(recent)} requests: p50 {p50:.2f} s, p99 {p99:.2f} s"
    table = Table(title=title, title_justify="left", show_footer=True, box=box.SIMPLE, padding=0, pad_edge=False)
    sums = [
        *_blocks(sum_blocks(cluster.replicas)),
        str(sum(row.num_reserved_blocks for row in cluster.replicas)),
        str(sum(stats.num_running for stats in spoken)),
        str(sum(stats.num_waiting for stats in spoken)),
    ]
    table.add_column("replica", footer="cluster", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name, footer in zip(COLUMNS, sums + [""] * (len(COLUMNS) - len(sums)), strict=True):
        table.add_column(name, footer=footer, justify="right", no_wrap=True)
    for row in cluster.replicas:
        table.add_row(row.replica_id, _state(row), *_cells(row))
    return table


def _state(row: ReplicaRow) -> str:
    from shoal_cluster.serve.replica_state import State, state_of

    state = state_of(row)
    if state is not State.READY:
        return state
    pace = state if row.slowness <= 1 else f"slow x{row.slowness:g}"
    return f"{pace}, {row.role}" if row.role else pace


def _cells(row: ReplicaRow) -> list[str]:
    stats = row.stats
    if stats is None:
        return ["-"] * len(COLUMNS)
    return [
        *_blocks(stats),
        str(row.num_reserved_blocks),
        str(stats.num_running),
        str(stats.num_waiting),
        f"{stats.hit_rate:.0%}",
        f"{row.age_s:.1f}s",
    ]


def _blocks(ledger: BlockLedger | ReplicaStats) -> list[str]:
    return [
        str(ledger.num_allocated_blocks),
        str(ledger.num_cached_blocks),
        str(ledger.num_free_blocks),
        str(ledger.num_total_blocks),
        f"{ledger.utilization:.0%}",
    ]
