"""The autoscaler's part of `shoal.v1.Control`: proto to domain and back.

Schedules are not sent, nor are a record's ``demand`` and ``state``: the proto has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal_cluster.policies.autoscaling_config import LIMITS, ScaleConfig, tunable
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.serve.control_codec import terms_from_proto, terms_to_proto, view_from_proto, view_to_proto
from shoal_cluster.serve.rows import ScalingRow
from shoal_protos import control_pb2 as pb

_RECORD_SCALARS = ("seq", "time_s", "num_before", "num_after", "num_running", "num_starting", "reason")


def scaling_to_proto(row: ScalingRow) -> pb.Scaling:
    """With the replicas as the current decision saw them only: those of all would be megabytes for a hundred."""
    return pb.Scaling(
        settings=_settings_to_proto(tunable(row.config)),
        tuned=row.tuned,
        current=None if row.current is None else scale_record_to_proto(row.current),
        records=[scale_record_to_proto(replace(record, replicas=())) for record in row.records],
    )


def scaling_from_proto(scaling: pb.Scaling) -> ScalingRow:
    """The row without its schedules."""
    return ScalingRow(
        config=_config_from_proto(scaling.settings),
        tuned=tuple(scaling.tuned),
        current=scale_record_from_proto(scaling.current) if scaling.HasField("current") else None,
        records=tuple(map(scale_record_from_proto, scaling.records)),
    )


def tune_to_proto(changes: Mapping[str, float], *, reset: bool) -> pb.TuneRequest:
    return pb.TuneRequest(changes=_settings_to_proto(changes), reset=reset)


def tune_from_proto(request: pb.TuneRequest) -> tuple[dict[str, float], bool]:
    """The changes by name, and whether to reset first."""
    return _settings_from_proto(request.changes), request.reset


def scale_record_to_proto(record: ScaleRecord) -> pb.ScaleRecord:
    return pb.ScaleRecord(
        terms=terms_to_proto(record.terms),
        replicas=map(view_to_proto, record.replicas),
        settings=_settings_to_proto(tunable(record.config)),
        **{name: getattr(record, name) for name in _RECORD_SCALARS},
    )


def scale_record_from_proto(record: pb.ScaleRecord) -> ScaleRecord:
    return ScaleRecord(
        terms=terms_from_proto(record.terms),
        replicas=tuple(map(view_from_proto, record.replicas)),
        config=_config_from_proto(record.settings),
        **{name: getattr(record, name) for name in _RECORD_SCALARS},
    )


def _settings_to_proto(values: Mapping[str, float]) -> pb.ScaleSettings:
    return pb.ScaleSettings(**values)  # type: ignore[arg-type]


def _settings_from_proto(settings: pb.ScaleSettings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in LIMITS if settings.HasField(name)}


def _config_from_proto(settings: pb.ScaleSettings) -> ScaleConfig:
    return ScaleConfig(**_settings_from_proto(settings))  # type: ignore[arg-type]
