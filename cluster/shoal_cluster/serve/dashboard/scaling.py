"""The autoscaler on the page: its last decision, its settings, a mark for each change, and a decision's full record."""

from __future__ import annotations

import msgspec

from shoal_cluster.policies.autoscaling_config import LIMITS, tunable
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.serve.rows import ScalingRow
from shoal_cluster.shortened import shortened

MAX_REASON_CHARS = 200


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that changed the count."""

    seq: int
    time_s: float
    num_before: int
    num_after: int
    reason: str


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaler's last look at the cluster, and its newest decisions that changed the count.

    Attributes:
        reason: why the last look decided as it did; ``looked_s`` is its Unix time, None before the first.
        settings: what may be tuned, by name; ``tuned`` names those that differ from the deployment's.
        marks: oldest first.
    """

    num_wanted: int | None
    reason: str
    looked_s: float | None
    settings: dict[str, float]
    tuned: tuple[str, ...]
    marks: tuple[Mark, ...]


def scaling_now(row: ScalingRow, num_marks: int) -> Scaling:
    """What an update says of ``row``."""
    current = row.current
    return Scaling(
        num_wanted=None if current is None else current.num_after,
        reason="" if current is None else shortened(current.reason, MAX_REASON_CHARS),
        looked_s=None if current is None else round(current.time_s, 1),
        settings=tunable(row.config),
        tuned=row.tuned,
        marks=tuple(mark(record) for record in row.records[max(0, len(row.records) - num_marks) :]),
    )


def mark(record: ScaleRecord) -> Mark:
    return Mark(
        seq=record.seq,
        time_s=round(record.time_s, 3),
        num_before=record.num_before,
        num_after=record.num_after,
        reason=shortened(record.reason, MAX_REASON_CHARS),
    )


def encode_decision(record: ScaleRecord) -> dict[str, object]:
    """A decision with everything that it weighed, for the page's full record."""
    return {
        "seq": record.seq,
        "time_s": record.time_s,
        "num_before": record.num_before,
        "num_after": record.num_after,
        "num_running": record.num_running,
        "num_starting": record.num_starting,
        "reason": record.reason,
        "terms": dict(record.terms),
        "settings": tunable(record.config),
        "replicas": [
            {
                "replica_id": view.replica_id,
                "age_s": view.age_s,
                "connected": view.connected,
                "num_allocated_blocks": view.stats.num_allocated_blocks if view.stats is not None else None,
                "num_total_blocks": view.stats.num_total_blocks if view.stats is not None else None,
                "num_running": view.stats.num_running if view.stats is not None else None,
                "num_waiting_tokens": view.stats.num_waiting_tokens if view.stats is not None else None,
            }
            for view in record.replicas
        ],
    }


def limits() -> dict[str, tuple[float, float]]:
    """The least and the greatest value of each setting that may be tuned, by name."""
    return dict(LIMITS)
