"""OpenTelemetry traces of calls. Spans are made from a call's record once it is over, so the call itself pays nothing.

Imported only where ``traces.otlp_endpoint`` is set. The engine's part (queue, prefill, decode) is timed by the replica
and carried back on its feed; the engine knows nothing of traces.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica.errors import ConfigError

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TraceState,
        set_span_in_context,
    )
except ImportError as error:
    raise ConfigError(
        f"traces.otlp_endpoint: needs OpenTelemetry's exporter ({error.name} is missing): pip install -e '.[otel]'"
    ) from None

EXPORT_TIMEOUT_S = 5.0
NS = 1_000_000_000

Attributes = dict[str, str | int | float | list[str]]


class CallTracer:
    """Sends the spans of each call to an OTLP endpoint over HTTP, in batches, from the exporter's own thread.

    Args:
        endpoint: "http://collector:4318"; its ``/v1/traces`` is used.
        sampled_share: share of calls to trace where the caller has not decided, in [0, 1].
    """

    def __init__(self, endpoint: str, sampled_share: float, model: str, gateway_id: str) -> None:
        self._model = model
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampled_share)),
            resource=Resource.create({"service.name": "shoal", "service.instance.id": gateway_id}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("shoal")

    def take(self, record: CallRecord) -> None:
        """Make the spans of a call that is over."""

        def ns(moment_s: float) -> int:
            return int((record.time_s + moment_s - record.arrived_s) * NS)

        root = self._tracer.start_span(
            "generate",
            context=_parent(record.trace),
            kind=SpanKind.SERVER,
            start_time=ns(record.arrived_s),
            attributes=_attributes(record, self._model),
        )
        if root.is_recording():
            context = set_span_in_context(root)
            for name, start_s, end_s, attributes in _steps(record):
                span = self._tracer.start_span(name, context=context, start_time=ns(start_s), attributes=attributes)
                span.end(ns(end_s))
            if record.outcome in (RequestOutcome.FAILED, RequestOutcome.DEADLINE, RequestOutcome.SHED):
                root.set_status(Status(StatusCode.ERROR, record.error))
        root.end(ns(record.ended_s))

    def close(self) -> None:
        """Send what is left. Blocks for up to about ``EXPORT_TIMEOUT_S``."""
        self._provider.shutdown()


def _steps(record: CallRecord) -> Iterator[tuple[str, float, float, Attributes]]:
    """(name, start, end, attributes) of each step that a call has reached."""
    yield "admit", record.arrived_s, record.legs[0].placed_s if record.legs else record.ended_s, {}
    for number, leg in enumerate(record.legs, start=1):
        attributes: Attributes = {"shoal.leg": number, "shoal.replica_id": leg.replica_id}
        if leg.end:
            attributes["shoal.leg.end"] = leg.end
        routed_s = leg.routed_s
        ended_s = record.ended_s if leg.ended_s is None else leg.ended_s
        yield "route", leg.placed_s, ended_s if routed_s is None else routed_s, attributes
        if routed_s is None or leg.first_token_s is None or leg.last_token_s is None:
            continue
        # Queue and prefill are timed by the replica's clock, the rest by ours: neither may outlast the first token.
        started_s = min(routed_s + (leg.queue_s or 0.0), leg.first_token_s)
        computed_s = min(started_s + (leg.prefill_s or 0.0), leg.first_token_s)
        yield "queue", routed_s, started_s, attributes
        yield "prefill", started_s, computed_s, attributes
        yield "decode", leg.first_token_s, leg.last_token_s, attributes  # the gap after prefill is the feed's


def _parent(trace: TraceContext | None) -> Context:
    if trace is None:
        return Context()
    span = SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([trace.state]) if trace.state else TraceState(),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())


def _attributes(record: CallRecord, model: str) -> Attributes:
    """A call's attributes, under OpenTelemetry's names for generative models where there are any, else our own."""
    attributes: Attributes = {
        "gen_ai.operation.name": "chat" if record.is_chat else "text_completion",
        "gen_ai.request.model": record.model or model,
        "shoal.request_id": record.request_id,
        "shoal.outcome": record.outcome.value,
    }
    if record.ttft_s is not None:
        attributes["gen_ai.server.time_to_first_token"] = record.ttft_s
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = [reason.value for reason in record.finish_reasons]
    if record.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = record.usage.num_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.usage.num_output_tokens
        attributes["shoal.num_cached_tokens"] = record.usage.num_cached_tokens
        attributes["shoal.num_resumes"] = record.usage.num_resumes
    if record.error:
        attributes["error.type"] = record.error
    return attributes
