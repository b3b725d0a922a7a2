"""Runs and searches of ``shoal sim``, with their progress and what they print.

``settings``: everything the result depends on, to be printed with it as JSON; None prints a summary instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from shoal_cluster.commands.sim_progress import ProgressBar
from shoal_cluster.sim.capacity import MAX_SPEED, find_capacity, find_replicas
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.plot import plot_run
from shoal_cluster.sim.report import to_json
from shoal_cluster.sim.run import report, run
from shoal_cluster.sim.timeline import Timeline
from shoal_cluster.sim.workload import SimRequest

PLOT_INTERVAL_S = 10.0

Settings = Mapping[str, object] | None


def run_once(config: SimConfig, arrivals: Sequence[SimRequest], plot: Path | None, settings: Settings) -> None:
    """Run, print the report, and draw it into the folder ``plot``."""
    cluster = SimCluster(config)
    timeline = Timeline(cluster, PLOT_INTERVAL_S) if plot is not None else None
    with ProgressBar(len(arrivals)) as bar:
        cluster.loop.after(0.0, lambda: bar.follow(cluster, len(arrivals)))
        run(cluster, arrivals, is_watched=timeline is not None)
    result = report(cluster)
    typer.echo(result.summary() if settings is None else to_json({**asdict(result), "settings": settings}))
    if plot is not None and timeline is not None:
        for path in plot_run(cluster, timeline, plot):
            typer.echo(str(path), err=True)


def find_speed(
    config: SimConfig, arrivals: Sequence[SimRequest], goodput: float, speed: float, settings: Settings
) -> None:
    """Search for the highest speed. ``arrivals`` are already ``speed`` times as fast as the trace; speeds are printed
    relative to the trace itself.
    """
    with ProgressBar(len(arrivals)) as bar:
        on_probe = _telling(bar, lambda tried: f"{speed * tried:.4g} times the speed")
        found = speed * find_capacity(config, arrivals, goodput, on_probe=on_probe, tell=bar.show, ahead=True)
    end = ", and no more was tried" if found == speed * MAX_SPEED else ""
    text = f"{found:.3f} times the trace's speed is carried{end}"
    _print({"routing": config.routing, "goodput": goodput, "capacity": found}, text, settings)


def find_fewest(config: SimConfig, arrivals: Sequence[SimRequest], goodput: float, settings: Settings) -> None:
    """Search for the smallest number of replicas."""
    with ProgressBar(len(arrivals)) as bar:
        on_probe = _telling(bar, lambda tried: f"{tried} replicas")
        found = find_replicas(config, arrivals, goodput, on_probe=on_probe, tell=bar.show, ahead=True)
    text = "1 replica carries it" if found == 1 else f"{found or 'no number of'} replicas carry it"
    _print({"routing": config.routing, "goodput": goodput, "replicas": found}, text, settings)


def _telling(bar: ProgressBar, name: Callable[[float], str]) -> Callable[[float, bool], None]:
    return lambda tried, is_carried: bar.say(f"{name(tried)}: {'carried' if is_carried else 'too much'}")


def _print(found: Mapping[str, object], text: str, settings: Settings) -> None:
    typer.echo(text if settings is None else to_json({**found, "settings": settings}))
