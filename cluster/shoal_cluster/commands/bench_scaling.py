"""``shoal bench scaling``: autoscalers compared on one load, in simulated time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal_cluster.policies.autoscaling_baselines import Scaling
    from shoal_cluster.sim.scaling_run import ScalingReport
    from shoal_cluster.sim.workload import SimRequest

COLUMNS = ("requests", "violations", "refused", "ttft p50", "p99", "replica-s", "peak", "changes", "returns")


def scaling(
    load: Annotated[str, typer.Option(help="ramp, square or bursts; or the path of an Azure trace.")] = "square",
    autoscaling: Annotated[
        list[str] | None, typer.Option(help="shoal, serve, hpa, kpa or threshold; several are compared. Default: all.")
    ] = None,
    requests_per_replica: Annotated[
        float, typer.Option(min=0.01, help="Target of serve and kpa, in requests per replica.")
    ] = 2.0,
    startup_s: Annotated[float, typer.Option(min=0, help="Seconds until a new replica serves.")] = 30.0,
    target_utilization: Annotated[float, typer.Option(help="Target of shoal and hpa.")] = 0.7,
    headroom: Annotated[float | None, typer.Option(min=0, help="Spare replicas, as for shoal tune.")] = None,
    burst_memory_s: Annotated[
        float | None, typer.Option(min=0, help="How long shoal stays ready for a past peak.")
    ] = None,
    held: Annotated[bool, typer.Option(help="Hold requests at the gateway, or place each on arrival.")] = True,
    seconds: Annotated[float | None, typer.Option(min=1, help="Simulate only the first N seconds of arrivals.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the generated loads.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare autoscalers in simulated time: objective violations, replica-seconds, and how often they changed."""
    from shoal_cluster.policies.autoscaling_baselines import SCALINGS
    from shoal_cluster.sim.scaling_run import plan, run_scaling, small_replica

    settings = {"target_utilization": target_utilization, "headroom": headroom, "burst_memory_s": burst_memory_s}
    changes = {name: value for name, value in settings.items() if value is not None}
    requests = [r for r in _requests(load, seed) if seconds is None or r.arrival_s < seconds]
    reports = []
    for name in autoscaling or SCALINGS:
        scheme = plan(_policy(name), startup_s, requests_per_replica, **changes)
        report, _ = run_scaling(small_replica(scheme, held=held), requests)
        reports.append(report)
        if not as_json:
            typer.echo(_line(report) if len(reports) > 1 else f"{_header()}\n{_line(report)}")
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))


def _requests(load: str, seed: int) -> list[SimRequest]:
    from shoal_cluster.sim.arrivals import SHAPES, arrivals
    from shoal_cluster.sim.traces import read_trace

    for shape in SHAPES:
        if shape == load:
            return arrivals(shape, seed)
    return read_trace(Path(load), "azure")


def _policy(name: str) -> Scaling:
    from shoal_cluster.policies.autoscaling_baselines import SCALINGS
    from shoal_replica.errors import ConfigError

    for policy in SCALINGS:
        if policy == name:
            return policy
    raise ConfigError(f"autoscaling: got {name!r}; must be one of {', '.join(SCALINGS)}")


def _header() -> str:
    return f"{'':10}" + "".join(f"{name:>11}" for name in COLUMNS)


def _line(report: ScalingReport) -> str:
    cells = (
        str(report.num_requests),
        f"{report.num_violations}",
        f"{report.num_refused}",
        f"{report.ttft_p50_s:.2f}",
        f"{report.ttft_p99_s:.2f}",
        f"{report.replica_s:.0f}",
        f"{report.num_replicas_peak}",
        f"{report.num_changes}",
        f"{report.num_returns}",
    )
    return f"{report.policy:10}" + "".join(f"{cell:>11}" for cell in cells)
