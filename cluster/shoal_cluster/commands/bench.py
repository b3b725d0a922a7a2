"""``shoal bench``: what the parts of Shoal cost on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from shoal_cluster.commands.bench_engine import engine
from shoal_cluster.commands.bench_scaling import scaling
from shoal_cluster.commands.bench_serving import serving

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure what a part of Shoal costs on this machine."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _bench() -> None:
    """Measure what a part of Shoal costs on this machine."""


app.command()(engine)
app.command()(scaling)
app.command()(serving)


@app.command()
def router(
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 64,
    blocks: Annotated[int, typer.Option(min=8192, help="Cached blocks of all replicas together.")] = 1_000_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests to place.")] = 20_000,
    rate: Annotated[float, typer.Option(min=1, help="Request rate for which core_share is reported.")] = 2_000.0,
    tenants: Annotated[int, typer.Option(min=1, help="Number of tenants, round-robin.")] = 1,
    held: Annotated[int, typer.Option(min=0, help="Requests kept waiting throughout.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Place requests while every replica reports its steps: times of decisions and updates, memory of the index."""
    from shoal_cluster.bench.router import RouterLoad, measure_router

    load = RouterLoad(
        num_replicas=replicas,
        num_blocks=blocks,
        num_requests=requests,
        requests_per_s=rate,
        num_tenants=tenants,
        num_held=held,
    )
    _say(asdict(measure_router(load)), as_json)


@app.command()
def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per stream.")] = 400,
    steps: Annotated[float, typer.Option(min=1, help="Steps per second; each gives every stream a token.")] = 100.0,
    model: Annotated[str, typer.Option(help="Model whose tokenizer is used.")] = "smollm2-135m-instruct",
    http: Annotated[bool, typer.Option("--http", help="Use server-sent events instead of gRPC.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stream tokens from a paced feed through a gateway and its gRPC or HTTP API: what one gateway core carries."""
    from shoal_cluster.bench.gateway import StreamLoad, measure_streams
    from shoal_cluster.bench.stream_clients import Face

    face: Face = "http" if http else "grpc"
    load = StreamLoad(num_streams=streams, num_tokens=tokens, steps_per_s=steps, model=model, face=face)
    _say(asdict(measure_streams(load)), as_json)


def _say(cost: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(cost, indent=2))
        return
    for name, value in cost.items():
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        typer.echo(f"{name:24} {shown}")
