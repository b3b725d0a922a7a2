"""Publishes points to Ray's metrics agent, by ``ray.util.metrics``; Prometheus scrapes the agent of each node.

Everything goes as a gauge: ``deploy/prometheus/METRICS.md`` says why, with figures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from ray.util.metrics import Gauge

from shoal_cluster.serve.metrics.tally import Histogram, Point

logger = logging.getLogger(__name__)

PERIOD_S = 2.0  # Ray drops a gauge that was not set for two of its export intervals, of at least a second each


class RayExport:
    """One process's series. Publishing takes two microseconds a value, so it is done once per ``PERIOD_S``."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._due_s = 0.0
        self._has_failed = False

    async def run(self, points: Callable[[], Iterable[Point]]) -> None:
        """Publish until cancelled."""
        while True:
            self.publish(points())
            await asyncio.sleep(PERIOD_S)

    def publish_if_due(self, points: Callable[[], Iterable[Point]], now: float) -> None:
        """Publish unless that was done less than ``PERIOD_S`` ago; ``now`` is on a monotonic clock."""
        if now >= self._due_s:
            self._due_s = now + PERIOD_S
            self.publish(points())

    def publish(self, points: Iterable[Point]) -> None:
        """Replace the values that Ray has of these series. What Ray does not take is logged once, and ends nothing."""
        try:
            self._publish(points)
        except Exception:  # whatever it is: nobody should go without answers for want of a metric
            if not self._has_failed:
                logger.exception("metrics cannot be given to Ray")
            self._has_failed = True

    def _publish(self, points: Iterable[Point]) -> None:
        for point in points:
            family = point.family
            labels = dict(zip((label.name for label in family.labels), point.labels, strict=True))
            if isinstance(point.value, Histogram):
                for bound, num in point.value.buckets():
                    self._set(f"{family.name}_bucket", family.help, num, {**labels, "le": bound})
                self._set(f"{family.name}_sum", family.help, point.value.sum, labels)
                self._set(f"{family.name}_count", family.help, point.value.num, labels)
            else:
                self._set(family.name, family.help, point.value, labels)

    def _set(self, name: str, words: str, value: float, labels: Mapping[str, str]) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, description=words, tag_keys=tuple(labels))
        # Ray takes ASCII alone; a model may have any name.
        gauge.set(float(value), tags={k: v.encode("ascii", "backslashreplace").decode() for k, v in labels.items()})
