"""`shoal.v1.Control.ExplainRoute`: proto to domain and back. Nothing is lost either way."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_cluster.policies.held import QueuePlace
from shoal_cluster.serve.control_codec import route_record_from_proto, route_record_to_proto
from shoal_cluster.serve.explanation import Explanation, HeldRequest, Refusal, SentBy
from shoal_protos import control_pb2 as pb


def explanation_to_proto(explanation: Explanation) -> pb.ExplainRouteResponse:
    return pb.ExplainRouteResponse(
        records=map(route_record_to_proto, explanation.records),
        looks=[pb.Look(request_id=look.request_id, queue=_queue_to_proto(look.queue)) for look in explanation.looks],
        held=[
            pb.Held(
                time_s=held.time_s,
                request_id=held.request_id,
                waited_s=held.waited_s,
                number=held.number,
                num_held=held.num_held,
                queue=_queue_to_proto(held.queue),
            )
            for held in explanation.held
        ],
        refusals=[
            pb.Refusal(
                time_s=refusal.time_s,
                request_id=refusal.request_id,
                reason=refusal.reason,
                retry_after_s=refusal.retry_after_s,
                terms=[pb.Term(name=name, value=value) for name, value in refusal.terms],
            )
            for refusal in explanation.refusals
        ],
    )


def explanation_from_proto(response: pb.ExplainRouteResponse) -> Explanation:
    return Explanation(
        records=tuple(map(route_record_from_proto, response.records)),
        looks=tuple(SentBy(look.request_id, _queue_from_proto(look.queue)) for look in response.looks),
        held=tuple(
            HeldRequest(h.time_s, h.request_id, h.waited_s, h.number, h.num_held, _queue_from_proto(h.queue))
            for h in response.held
        ),
        refusals=tuple(
            Refusal(r.time_s, r.request_id, r.reason, r.retry_after_s, tuple((t.name, t.value) for t in r.terms))
            for r in response.refusals
        ),
    )


def explanation_to_bytes(explanation: Explanation) -> bytes:
    """What a gateway answers to another."""
    return bytes(explanation_to_proto(explanation).SerializeToString())


def explanation_from_bytes(raw: bytes) -> Explanation:
    """The same read."""
    return explanation_from_proto(pb.ExplainRouteResponse.FromString(raw))


def _queue_to_proto(queue: Iterable[QueuePlace]) -> list[pb.QueuePlace]:
    return [pb.QueuePlace(request_id=p.request_id, replica_id=p.replica_id, due_in_s=p.due_in_s) for p in queue]


def _queue_from_proto(queue: Iterable[pb.QueuePlace]) -> tuple[QueuePlace, ...]:
    return tuple(QueuePlace(place.request_id, place.replica_id, place.due_in_s) for place in queue)
