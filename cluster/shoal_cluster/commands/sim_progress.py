"""A progress bar for a run."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from shoal_cluster.sim.cluster import SimCluster

INTERVAL_S = 5.0  # of simulated time


class ProgressBar:
    """Shows on standard error, if that is a terminal, how many requests of a run have ended."""

    def __init__(self, num_requests: int) -> None:
        columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        console = Console(stderr=True)
        self._bar = Bar(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task("", total=num_requests)
        self._num_done = 0

    def show(self, num_done: int) -> None:
        """Show ``num_done``; a smaller number than before means that another run has begun."""
        if num_done < self._num_done:
            self._bar.reset(self._task)
        self._num_done = num_done
        self._bar.update(self._task, completed=num_done)

    def say(self, line: str) -> None:
        """Print a line above the bar, or without a bar where none is shown."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def follow(self, cluster: SimCluster, num_requests: int) -> None:
        """Show the cluster's progress every ``INTERVAL_S`` while it runs, without changing the run."""
        num_open = cluster.book.num_open
        self.show(num_requests - num_open)
        if num_open:
            cluster.loop.after(INTERVAL_S, lambda: self.follow(cluster, num_requests))

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
