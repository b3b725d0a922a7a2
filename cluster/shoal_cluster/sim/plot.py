"""Plots of a run: latency of requests, and load of replicas."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.timeline import Timeline
from shoal_replica.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 16  # with more replicas, quantiles are drawn instead of one line each


def check_plot(folder: Path) -> None:
    """Create ``folder`` before a run that is to be plotted.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be created or written to.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("plot: needs matplotlib: pip install -e '.[plot]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plot: got {str(folder)!r}; no such folder can be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"plot: got {str(folder)!r}; it must be a folder to write in")


def plot_run(cluster: SimCluster, timeline: Timeline, folder: Path) -> list[Path]:
    """Write ``latency.png`` and ``load.png`` into ``folder``, which must exist; return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = [folder / "latency.png", folder / "load.png"]
    for path, draw in zip(paths, (_draw_latency, _draw_load), strict=True):
        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, 2), cluster, timeline)
        figure.savefig(path, dpi=120, metadata={"Software": None})
    return paths


def _draw_latency(axes: list[Axes], cluster: SimCluster, timeline: Timeline) -> None:
    finished = [o for o in cluster.book.outcomes.values() if o.finished_s is not None and o.first_token_s is not None]
    ttfts = [o.first_token_s - o.arrival_s for o in finished if o.first_token_s is not None]
    spent = [t / o.objective_s for t, o in zip(ttfts, finished, strict=True)]
    _draw_cdf(axes[0], ttfts, "time to first token, s")
    _draw_cdf(axes[1], spent, "time to first token, share of the objective")
    axes[1].axvline(1.0, color="grey", linestyle=":")


def _draw_cdf(axis: Axes, values: list[float], label: str) -> None:
    ordered = sorted(values)
    axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    axis.set(xlabel=label, ylabel="share of requests", xscale="log", ylim=(0, 1))
    axis.grid(alpha=0.3)


def _draw_load(axes: list[Axes], cluster: SimCluster, timeline: Timeline) -> None:
    for axis, name, label in ((axes[0], "busy", "share of time busy"), (axes[1], "held", "share of blocks held")):
        rows = [(series.time_s, getattr(series, name)) for _, series in sorted(timeline.series.items())]
        if len(rows) <= MAX_LINES:
            for time_s, values in rows:
                axis.plot(time_s, values, linewidth=0.8, alpha=0.7)
        else:
            at: dict[float, list[float]] = {}
            for time_s, values in rows:
                for time, value in zip(time_s, values, strict=True):
                    at.setdefault(time, []).append(value)
            times = sorted(at)
            for quantile in (0.0, 0.5, 1.0):
                axis.plot(times, [sorted(at[t])[round(quantile * (len(at[t]) - 1))] for t in times], linewidth=0.8)
        axis.set(xlabel="time, s", ylabel=label, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
