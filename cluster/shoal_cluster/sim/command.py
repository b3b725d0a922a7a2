"""``shoal sim``: replay a trace on a cluster that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal_cluster.policies.baselines import ROUTINGS, Routing
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.report import SimReport
from shoal_cluster.sim.run import simulate
from shoal_cluster.sim.workload import TraceFormat, read_trace, speed_up
from shoal_replica.config import CacheConfig
from shoal_replica.errors import ConfigError


def sim(
    trace: Annotated[Path, typer.Option(help="Trace file, plain or .gz.")],
    trace_format: Annotated[str, typer.Option("--format", help="mooncake or azure.")] = "mooncake",
    replicas: Annotated[int, typer.Option(min=1)] = 8,
    blocks_per_replica: Annotated[int, typer.Option(min=1)] = 1000,
    block_size: Annotated[int, typer.Option(min=1)] = 512,
    routing: Annotated[str, typer.Option(help=", ".join(ROUTINGS))] = "predicted_ttft",
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Replay a request trace on a simulated cluster and report times to first token, hits and balance."""
    arrivals = speed_up(read_trace(trace, _format(trace_format), requests), speed)
    config = SimConfig(
        num_replicas=replicas,
        cache=CacheConfig(num_blocks=blocks_per_replica, block_size=block_size),
        routing=_routing(routing),
        seed=seed,
    )
    report = simulate(config, arrivals)
    typer.echo(report.to_json() if as_json else _summary(report))


def _format(name: str) -> TraceFormat:
    if name == "mooncake":
        return "mooncake"
    if name == "azure":
        return "azure"
    raise ConfigError(f"format: got {name!r}; must be one of mooncake, azure")


def _routing(name: str) -> Routing:
    for routing in ROUTINGS:
        if routing == name:
            return routing
    raise ConfigError(f"routing: got {name!r}; must be one of {', '.join(ROUTINGS)}")


def _summary(report: SimReport) -> str:
    ttft, latency = report.ttft_s, report.latency_s
    rows = (
        ("requests", f"{report.num_finished} finished, {report.num_shed} shed, of {report.num_requests}"),
        ("first token", f"p50 {ttft.p50:.2f} s, p90 {ttft.p90:.2f} s, p99 {ttft.p99:.2f} s"),
        ("latency", f"p50 {latency.p50:.2f} s, p90 {latency.p90:.2f} s, p99 {latency.p99:.2f} s"),
        ("goodput", f"{report.goodput:.1%} within the objective"),
        ("hit rate", f"{report.hit_rate:.1%} ({report.predicted_hit_rate:.1%} predicted)"),
        ("imbalance", f"{report.imbalance:.3f} busiest over mean; {report.utilization:.1%} busy"),
        ("preemptions", f"{report.num_preemptions}"),
        ("output", f"{report.output_tokens_per_s:.0f} tokens/s over {report.duration_s:.0f} s"),
    )
    return "\n".join(f"{name:<12} {text}" for name, text in rows)
