"""Renders points as the text that Prometheus scrapes, and the definitions as the table that documents them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_cluster.serve.metrics.definitions import FAMILIES, Family, Kind
from shoal_cluster.serve.metrics.tally import Histogram, Point

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(points: Iterable[Point]) -> bytes:
    """``points`` as text of type CONTENT_TYPE, grouped by family in the order of the definitions."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(points))
    return bytes(generate_latest(registry))


class _Once(Collector):
    def __init__(self, points: Iterable[Point]) -> None:
        self._of: dict[Family, list[Point]] = {}
        for point in points:
            self._of.setdefault(point.family, []).append(point)

    def collect(self) -> list[Metric]:
        return [_metric(family, self._of[family]) for family in FAMILIES if family in self._of]

    def describe(self) -> Iterable[Metric]:
        return ()


def _metric(family: Family, points: list[Point]) -> Metric:
    names = [label.name for label in family.labels]
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(family.name, family.help, labels=names)
        for point in points:
            if isinstance(point.value, Histogram):
                histogram.add_metric(point.labels, point.value.buckets(), point.value.sum)
        return histogram
    made = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = made(family.name, family.help, labels=names)
    for point in points:
        if not isinstance(point.value, Histogram):
            metric.add_metric(point.labels, point.value)
    return metric


def markdown_table() -> str:
    """The table in ``deploy/prometheus/METRICS.md``."""
    lines = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(
            f"`{label.name}`" + (f" ({', '.join(label.values)})" if label.values else "") for label in family.labels
        )
        lines.append(f"| `{family.name}` | {family.kind} | {family.unit} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown_table(), end="")
