"""What one process has counted. Counting is a dictionary or list update; nothing is sent from here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product

from shoal_cluster.serve.metrics.definitions import Family, Kind


class Histogram:
    """Counts values by upper bound. ``observe`` takes a third of a microsecond."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Count ``value`` ``num`` times."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.sum += value * num

    @property
    def num(self) -> int:
        return sum(self.counts)

    @classmethod
    def of(cls, bounds: tuple[float, ...], counts: list[int], total: float) -> Histogram:
        """A histogram that was counted elsewhere. Raises ValueError if it has other buckets."""
        if len(counts) != len(bounds) + 1:
            raise ValueError(f"{len(counts)} counts for {len(bounds)} bounds")
        histogram = cls(bounds)
        histogram.counts, histogram.sum = counts, total
        return histogram

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, number of values up to it); the last is for all values."""
        names = (*(str(bound) for bound in self.bounds), "+Inf")
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Point:
    """The current value of one series. ``labels`` are in the order of the family's."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


class Tally:
    """The counters and histograms among ``families``, as one process counts them. Every possible series is there from
    the start, at zero, so that a rate sees its first event.

    Args:
        identity: values of the families' id labels, which come first.
    """

    def __init__(self, families: Iterable[Family], *identity: str) -> None:
        self._identity = identity
        self._counters: dict[Family, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[Family, Histogram] = {}
        for family in families:
            if family.kind is Kind.COUNTER:
                values = [label.values or () for label in family.labels[len(identity) :]]
                self._counters[family] = dict.fromkeys(product(*values), 0)
            elif family.kind is Kind.HISTOGRAM:
                self._histograms[family] = Histogram(family.buckets)

    def inc(self, family: Family, *labels: str, by: float = 1) -> None:
        """Raise a counter. KeyError if its definition does not name a label value."""
        cells = self._counters[family]
        cells[labels] = cells[labels] + by

    def count(self, family: Family, *labels: str) -> float:
        """A counter's value: for the given labels, or summed over all."""
        cells = self._counters[family]
        return cells[labels] if labels else sum(cells.values())

    def histogram(self, family: Family) -> Histogram:
        return self._histograms[family]

    def points(self) -> Iterator[Point]:
        for family, cells in self._counters.items():
            for labels, value in cells.items():
                yield Point(family, (*self._identity, *labels), value)
        for family, histogram in self._histograms.items():
            yield Point(family, self._identity, histogram)
