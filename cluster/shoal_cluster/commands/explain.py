"""``shoal explain``: why a request was placed where it was, and why there are as many replicas as there are."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS

if TYPE_CHECKING:
    from rich.console import Console

    from shoal_cluster.policies.autoscaling_view import ScaleRecord
    from shoal_cluster.policies.route_record import RouteRecord
    from shoal_cluster.serve.explanation import Explanation
    from shoal_cluster.serve.rows import ScalingRow

REJECTED = "rejected"
COLUMN_WIDTH = 13  # minimum width of a replica's column: its numbers, or why it was rejected


def explain(
    request_id: Annotated[str | None, typer.Argument(help="Id printed by `shoal generate`, or an answer's id.")] = None,
    address: Annotated[str, typer.Option(help="The gateway's gRPC address.")] = DEFAULT_GRPC_ADDRESS,
    scaling: Annotated[bool, typer.Option("--scaling", help="Show scaling decisions instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON.")] = False,
) -> None:
    """Show every routing decision made for a request, replayed here from its record, or that it is held or was refused.
    With --scaling, show the recorded scaling decisions instead.
    """
    if scaling and request_id is not None:
        raise typer.BadParameter("give a request id or --scaling, not both")
    if scaling:
        _explain_scaling(address, as_json)
    elif request_id is not None:
        _explain_route(address, request_id, as_json)
    else:
        raise typer.BadParameter("give a request id or --scaling")


def _explain_scaling(address: str, as_json: bool) -> None:
    from rich.console import Console

    row = asyncio.run(_fetch_scaling(address))
    decisions = row.records if row.current is None else (*row.records, row.current)
    if as_json:
        from shoal_cluster.serve.dashboard.scaling import encode_decision

        typer.echo(json.dumps([encode_decision(decision) for decision in decisions], indent=2))
        return
    for decision in decisions:
        _print_scaling(Console(highlight=False), decision)


def _explain_route(address: str, request_id: str, as_json: bool) -> None:
    from rich.console import Console

    from shoal_cluster.serve.explanation import clock

    explanation = asyncio.run(_fetch(address, request_id))
    if as_json:
        from shoal_cluster.serve.dashboard.records import encode_explanation

        typer.echo(json.dumps(encode_explanation(explanation), indent=2))
        return
    console = Console(highlight=False)
    if explanation.left_off:
        console.print(explanation.left_off)
    for refusal in explanation.refusals:
        console.print(f"{clock(refusal.time_s)}  {refusal.text}", markup=False)
        if refusal.record is not None:
            again = "the same answer" if refusal.record.replay() == refusal.record.admission else "ANOTHER answer"
            console.print(f"taken again from the record: {again}", markup=False)
    sent_by = {look.request_id: look for look in explanation.looks}
    for record in explanation.records:
        _print_route(console, record)
        if (look := sent_by.get(record.query.request_id)) is not None:
            console.print(look.text, markup=False)
    for held in explanation.held:
        console.print(f"{clock(held.time_s)}  {held.text}", markup=False)


async def _fetch(address: str, request_id: str) -> Explanation:
    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        return await client.explain(request_id)


async def _fetch_scaling(address: str) -> ScalingRow:
    from shoal_cluster.commands.client import GatewayClient

    async with GatewayClient(address) as client:
        return await client.scaling()


def _print_scaling(console: Console, record: ScaleRecord) -> None:
    """Print two lines: the decision, and the terms that it weighed."""
    from shoal_cluster.serve.explanation import clock

    count = f"{record.num_before} -> {record.num_after}" if record.num_before != record.num_after else record.num_after
    console.print(f"{clock(record.time_s)}  {count}  {record.reason}", markup=False)
    terms = ", ".join(f"{name} {value:.6g}" for name, value in record.terms)
    console.print(f"          {record.num_running} run, {record.num_starting} start; {terms}", markup=False)


def _print_route(console: Console, record: RouteRecord) -> None:
    """Print the request, its candidates, and what was decided, then and again from the record."""
    from shoal_cluster.serve.explanation import clock

    query = record.query
    console.print(
        f"{clock(record.time_s)}  {query.request_id}: {query.num_prompt_tokens} prompt tokens, "
        f"{query.num_blocks_needed} blocks of {query.block_size}",
        markup=False,
    )
    _print_candidates(console, record)
    console.print(record.decision.reason, markup=False)
    again = "the same choice" if record.replay() == record.decision else "ANOTHER choice"
    console.print(f"by {record.by}; taken again from the record: {again}", markup=False)


def _print_candidates(console: Console, record: RouteRecord) -> None:
    """Print a column per candidate, best first, as many as fit the terminal, and a row per term."""
    from rich.table import Table

    decision = record.decision
    rank = {replica_id: place for place, replica_id in enumerate(decision.ranked, start=1)}
    names = list(dict.fromkeys(name for candidate in decision.candidates for name, _ in candidate.terms))
    candidates = sorted(decision.candidates, key=lambda c: rank.get(c.replica_id, len(rank) + 1))
    widest = max((len(c.replica_id) for c in candidates), default=0)
    room = max(1, (console.width - max(map(len, (*names, REJECTED))) - 4) // (max(widest, COLUMN_WIDTH) + 3))
    shown = candidates[:room]
    table = Table("rank", *(str(rank.get(c.replica_id, "-")) for c in shown))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("replica", *(c.replica_id for c in shown))
    table.add_row("score", *(f"{c.score:.1f}" if c.eligible else "-" for c in shown))
    terms = [dict(c.terms) for c in shown]
    for name in names:
        table.add_row(name, *(f"{each[name]:g}" if name in each else "-" for each in terms))
    ages_s = record.ages_s()
    table.add_row("age_s", *(f"{ages_s[c.replica_id]:.3g}" if c.replica_id in ages_s else "-" for c in shown))
    if any(c.rejected for c in shown):
        table.add_row(REJECTED, *(c.rejected for c in shown))
    console.print(table)
    if len(shown) < len(candidates):
        console.print(f"and {len(candidates) - len(shown)} more; a wider terminal shows them")
