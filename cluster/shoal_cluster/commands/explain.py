"""``shoal explain``: why a request went where it went, and why there are as many replicas as there are."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal_cluster.policies.autoscaling_view import ScaleRecord
    from shoal_cluster.policies.routing import RouteRecord
    from shoal_cluster.serve.call import ScalingRow


def explain(
    request_id: Annotated[str | None, typer.Argument(help="The id that `shoal generate` printed.")] = None,
    address: Annotated[str, typer.Option(help="The gateway's gRPC address.")] = DEFAULT_GRPC_ADDRESS,
    scaling: Annotated[bool, typer.Option("--scaling", help="Show scaling decisions instead.")] = False,
) -> None:
    """Show every routing decision made for a request, or with --scaling every scaling decision kept."""
    from rich.console import Console

    console = Console(highlight=False)
    if scaling:
        row = asyncio.run(_fetch_scaling(address))
        for decision in row.records if row.current is None else (*row.records, row.current):
            _print_scaling(console, decision)
        return
    if request_id is None:
        raise typer.BadParameter("give a request's id, or --scaling")
    for record in asyncio.run(_fetch(address, request_id)):
        when = time.strftime("%H:%M:%S", time.localtime(record.time_s))
        query = record.query
        console.print(
            f"{when}  {query.request_id}: {query.num_prompt_tokens} prompt tokens, "
            f"{query.num_blocks_needed} blocks of {query.block_size}",
            markup=False,
        )
        console.print(_table(record))
        console.print(record.decision.reason, markup=False)


async def _fetch(address: str, request_id: str) -> tuple[RouteRecord, ...]:
    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        return await client.explain(request_id)


async def _fetch_scaling(address: str) -> ScalingRow:
    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        return await client.scaling()


def _print_scaling(console: Console, record: ScaleRecord) -> None:
    """Two lines: the decision, and what it weighed."""
    when = time.strftime("%H:%M:%S", time.localtime(record.time_s))
    count = f"{record.num_before} -> {record.num_after}" if record.num_before != record.num_after else record.num_after
    console.print(f"{when}  {count}  {record.reason}", markup=False)
    terms = ", ".join(f"{name} {value:.6g}" for name, value in record.terms)
    console.print(f"          {record.num_running} run, {record.num_starting} start; {terms}", markup=False)


def _table(record: RouteRecord) -> Table:
    """One row a candidate, the best first; one column a term."""
    from rich.table import Table

    decision = record.decision
    rank = {replica_id: place for place, replica_id in enumerate(decision.ranked, start=1)}
    names = list(dict.fromkeys(name for candidate in decision.candidates for name, _ in candidate.terms))
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("replica", no_wrap=True)
    for name in ("score", *names):
        table.add_column(name, justify="right")
    table.add_column("rejected")
    for candidate in sorted(decision.candidates, key=lambda c: rank.get(c.replica_id, len(rank) + 1)):
        terms = dict(candidate.terms)
        table.add_row(
            str(rank.get(candidate.replica_id, "-")),
            candidate.replica_id,
            f"{candidate.score:.1f}" if candidate.eligible else "-",
            *(f"{terms[name]:g}" if name in terms else "-" for name in names),
            candidate.rejected,
        )
    return table
