"""A progress bar for people who wait for a run."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from shoal_cluster.sim.cluster import SimCluster

INTERVAL_S = 5.0  # of simulated time


class Progress:
    """Shows on standard error, if that is a terminal, how many of a run's requests are done. It changes nothing."""

    def __init__(self, cluster: SimCluster, num_requests: int) -> None:
        self._cluster = cluster
        columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        console = Console(stderr=True)
        self._bar = Bar(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task("", total=num_requests)
        self._num_requests = num_requests
        cluster.loop.after(0.0, self._look)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _look(self) -> None:
        num_open = self._cluster.book.num_open
        self._bar.update(self._task, completed=self._num_requests - num_open)
        if num_open:
            self._cluster.loop.after(INTERVAL_S, self._look)
