"""`shoal.v1.Control.ExplainRoute`: proto to domain and back. Nothing is lost but what does not fit into a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from shoal_cluster.policies.admission import Admission, AdmissionLimits, AdmissionRecord, Queued
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending_request import QueuePlace
from shoal_cluster.serve.control_codec import (
    query_from_proto,
    query_to_proto,
    route_record_from_proto,
    route_record_to_proto,
    terms_from_proto,
    terms_to_proto,
    view_from_proto,
    view_to_proto,
)
from shoal_cluster.serve.explanation import Explanation, HeldRequest, Refusal, SentBy
from shoal_protos import control_pb2 as pb

MAX_PART_BYTES = 3 * 2**19
"""Limit for the records, and again for the refusals: clients take messages of up to 4 MiB unless told otherwise."""

Part = TypeVar("Part", pb.RouteRecord, pb.Refusal)

_HELD_SCALARS = ("time_s", "request_id", "waited_s", "number", "num_held")  # under the same names in the proto
_REFUSAL_SCALARS = ("time_s", "request_id", "reason", "retry_after_s")
_LIMIT_SCALARS = ("max_waiting_tokens", "max_waiting_requests", "pair_s")
_WAIT_SCALARS = ("deadline_in_s", "was_last")
_ADMISSION_SCALARS = ("admitted", "reason", "never_fits", "never_in_time")


def explanation_to_proto(explanation: Explanation) -> pb.ExplainRouteResponse:
    records = _newest(map(route_record_to_proto, reversed(explanation.records)))
    refusals = _newest(map(_refusal_to_proto, reversed(explanation.refusals)))
    num_left_off = len(explanation.records) - len(records) + len(explanation.refusals) - len(refusals)
    return pb.ExplainRouteResponse(
        records=records,
        looks=[pb.Look(request_id=look.request_id, queue=_queue_to_proto(look.queue)) for look in explanation.looks],
        held=[pb.Held(queue=_queue_to_proto(h.queue), **_named(h, _HELD_SCALARS)) for h in explanation.held],
        refusals=refusals,
        num_left_off=explanation.num_left_off + num_left_off,
    )


def explanation_from_proto(response: pb.ExplainRouteResponse) -> Explanation:
    return Explanation(
        records=tuple(map(route_record_from_proto, response.records)),
        looks=tuple(SentBy(look.request_id, _queue_from_proto(look.queue)) for look in response.looks),
        held=tuple(HeldRequest(queue=_queue_from_proto(h.queue), **_named(h, _HELD_SCALARS)) for h in response.held),
        refusals=tuple(map(_refusal_from_proto, response.refusals)),
        num_left_off=response.num_left_off,
    )


def explanation_to_bytes(explanation: Explanation) -> bytes:
    """A gateway's answer to another gateway."""
    return bytes(explanation_to_proto(explanation).SerializeToString())


def explanation_from_bytes(raw: bytes) -> Explanation:
    """Decode another gateway's answer."""
    return explanation_from_proto(pb.ExplainRouteResponse.FromString(raw))


def _newest(parts: Iterable[Part]) -> list[Part]:
    """As many of ``parts``, given newest first, as there is room for, at least one; returned oldest first."""
    kept: list[Part] = []
    num_bytes = 0
    for part in parts:
        num_bytes += part.ByteSize()
        if kept and num_bytes > MAX_PART_BYTES:
            break
        kept.append(part)
    return kept[::-1]


def _refusal_to_proto(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        terms=terms_to_proto(refusal.terms),
        record=None if refusal.record is None else _admission_to_proto(refusal.record),
        **_named(refusal, _REFUSAL_SCALARS),
    )


def _refusal_from_proto(refusal: pb.Refusal) -> Refusal:
    return Refusal(
        terms=terms_from_proto(refusal.terms),
        record=_admission_from_proto(refusal.record) if refusal.HasField("record") else None,
        **_named(refusal, _REFUSAL_SCALARS),
    )


def _admission_to_proto(record: AdmissionRecord) -> pb.AdmissionRecord:
    objective = record.limits.objective
    return pb.AdmissionRecord(
        query=query_to_proto(record.query),
        replicas=map(view_to_proto, record.replicas.views()),
        objective=None if objective is None else pb.LatencyObjective(**asdict(objective)),
        num_held_tokens=record.queued.num_tokens,
        num_held=record.queued.num_requests,
        num_refused_tokens=record.queued.num_refused_tokens,
        waited_s=record.waited_s,
        retry_after_s=record.admission.retry_after_s,
        **_named(record.limits, _LIMIT_SCALARS),
        **_named(record, _WAIT_SCALARS),
        **_named(record.admission, _ADMISSION_SCALARS),
    )


def _admission_from_proto(record: pb.AdmissionRecord) -> AdmissionRecord:
    objective = None
    if record.HasField("objective"):
        objective = LatencyObjective(**_named(record.objective, ("ttft_s", "prefill_factor")))
    return AdmissionRecord(
        query=query_from_proto(record.query),
        replicas=Candidates.of(map(view_from_proto, record.replicas)),
        limits=AdmissionLimits(objective=objective, **_named(record, _LIMIT_SCALARS)),
        queued=Queued(int(record.num_held_tokens), record.num_held, int(record.num_refused_tokens)),
        waited_s=record.waited_s if record.HasField("waited_s") else None,
        admission=Admission(
            retry_after_s=record.retry_after_s if record.HasField("retry_after_s") else None,
            **_named(record, _ADMISSION_SCALARS),
        ),
        **_named(record, _WAIT_SCALARS),
    )


def _named(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _queue_to_proto(queue: Iterable[QueuePlace]) -> list[pb.QueuePlace]:
    return [pb.QueuePlace(request_id=p.request_id, replica_id=p.replica_id, due_in_s=p.due_in_s) for p in queue]


def _queue_from_proto(queue: Iterable[pb.QueuePlace]) -> tuple[QueuePlace, ...]:
    return tuple(QueuePlace(place.request_id, place.replica_id, place.due_in_s) for place in queue)
