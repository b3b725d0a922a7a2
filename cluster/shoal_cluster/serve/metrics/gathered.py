"""The replicas' series on a gateway's ``/metrics``: at each scrape they are asked for what their stats do not hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from shoal_cluster.serve.metrics.definitions import FAMILIES, Kind
from shoal_cluster.serve.metrics.replica import stats_points
from shoal_cluster.serve.metrics.tally import Histogram, Point
from shoal_cluster.serve.rows import ReplicaRow
from shoal_replica.errors import NotFound, Unavailable

_FAMILY = {family.name: family for family in FAMILIES}


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """A point as it is sent. ``counts`` are those of a histogram; ``value`` is then its sum."""

    name: str
    labels: tuple[str, ...]
    value: float
    counts: list[int] | None = None


def encode_points(points: Iterable[Point]) -> bytes:
    """Encode ``points`` for ``decode_points``."""
    told = []
    for point in points:
        value = point.value
        if isinstance(value, Histogram):
            told.append(_Told(point.family.name, point.labels, value.sum, value.counts))
        else:
            told.append(_Told(point.family.name, point.labels, value))
    return msgspec.msgpack.encode(told)


def decode_points(body: bytes) -> list[Point]:
    """Decode what ``encode_points`` made. Series that only another version of this program knows are left out.

    Raises:
        msgspec.DecodeError: ``body`` is something else.
    """
    points = []
    for told in msgspec.msgpack.decode(body, type=list[_Told]):
        family = _FAMILY.get(told.name)
        if family is None or len(family.labels) != len(told.labels):
            continue
        if family.kind is not Kind.HISTOGRAM:
            points.append(Point(family, told.labels, told.value))
        elif told.counts is not None and len(told.counts) == len(family.buckets) + 1:
            points.append(Point(family, told.labels, Histogram.of(family.buckets, told.counts, told.value)))
    return points


async def replica_points(replicas: Iterable[ReplicaRow], ask: Callable[[str], Awaitable[bytes]]) -> list[Point]:
    """All series of the replicas: from their stats, and from their answers to ``ask(replica_id)``.

    A replica that does not answer contributes its stats only.
    """
    rows = [row for row in replicas if row.stats is not None]
    points = [point for row in rows if row.stats is not None for point in stats_points(row.replica_id, row.stats)]
    for told in await asyncio.gather(*(_answer(ask, row.replica_id) for row in rows if row.connected)):
        points += told
    return points


async def _answer(ask: Callable[[str], Awaitable[bytes]], replica_id: str) -> list[Point]:
    try:
        return decode_points(await ask(replica_id))
    except (NotFound, Unavailable):
        return []
