"""`shoal.v1.Control.ExplainRoute`: proto to domain and back. Nothing is lost either way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal_cluster.policies.held import QueuePlace
from shoal_cluster.serve.control_codec import (
    route_record_from_proto,
    route_record_to_proto,
    terms_from_proto,
    terms_to_proto,
)
from shoal_cluster.serve.explanation import Explanation, HeldRequest, Refusal, SentBy
from shoal_protos import control_pb2 as pb

_HELD_SCALARS = ("time_s", "request_id", "waited_s", "number", "num_held")  # under the same names in the proto
_REFUSAL_SCALARS = ("time_s", "request_id", "reason", "retry_after_s")


def explanation_to_proto(explanation: Explanation) -> pb.ExplainRouteResponse:
    return pb.ExplainRouteResponse(
        records=map(route_record_to_proto, explanation.records),
        looks=[pb.Look(request_id=look.request_id, queue=_queue_to_proto(look.queue)) for look in explanation.looks],
        held=[pb.Held(queue=_queue_to_proto(h.queue), **_named(h, _HELD_SCALARS)) for h in explanation.held],
        refusals=[
            pb.Refusal(terms=terms_to_proto(r.terms), **_named(r, _REFUSAL_SCALARS)) for r in explanation.refusals
        ],
    )


def explanation_from_proto(response: pb.ExplainRouteResponse) -> Explanation:
    return Explanation(
        records=tuple(map(route_record_from_proto, response.records)),
        looks=tuple(SentBy(look.request_id, _queue_from_proto(look.queue)) for look in response.looks),
        held=tuple(HeldRequest(queue=_queue_from_proto(h.queue), **_named(h, _HELD_SCALARS)) for h in response.held),
        refusals=tuple(
            Refusal(terms=terms_from_proto(r.terms), **_named(r, _REFUSAL_SCALARS)) for r in response.refusals
        ),
    )


def explanation_to_bytes(explanation: Explanation) -> bytes:
    """What a gateway answers to another."""
    return bytes(explanation_to_proto(explanation).SerializeToString())


def explanation_from_bytes(raw: bytes) -> Explanation:
    """The same read."""
    return explanation_from_proto(pb.ExplainRouteResponse.FromString(raw))


def _named(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _queue_to_proto(queue: Iterable[QueuePlace]) -> list[pb.QueuePlace]:
    return [pb.QueuePlace(request_id=p.request_id, replica_id=p.replica_id, due_in_s=p.due_in_s) for p in queue]


def _queue_from_proto(queue: Iterable[pb.QueuePlace]) -> tuple[QueuePlace, ...]:
    return tuple(QueuePlace(place.request_id, place.replica_id, place.due_in_s) for place in queue)
