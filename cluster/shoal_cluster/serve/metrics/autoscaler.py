"""The autoscaler's metrics: counted by the policy in Serve's controller, and by gateways from what it has left them."""

from __future__ import annotations

from collections.abc import Iterator

from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics.tally import Point, Tally


class AutoscalerMetrics:
    """Counts the autoscaler's decisions."""

    def __init__(self) -> None:
        self._tally = Tally((d.SCALINGS,))
        self._num_desired = self._num_running = 0

    def take(self, num_target: int, num_desired: int, num_running: int) -> None:
        """Take a decision, a change or not: from ``num_target`` replicas to ``num_desired``; ``num_running`` run."""
        if num_desired != num_target:
            self._tally.inc(d.SCALINGS, "up" if num_desired > num_target else "down")
        self._num_desired, self._num_running = num_desired, num_running

    def points(self) -> Iterator[Point]:
        yield from self._tally.points()
        yield Point(d.DESIRED, (), self._num_desired)
        yield Point(d.RUNNING, (), self._num_running)
