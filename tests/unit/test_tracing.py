"""A call's spans, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fixtures.otlp_collector import Collector, attributes, collecting

from shoal_cluster.config import TraceSettings
from shoal_cluster.serve.call import Usage
from shoal_cluster.serve.call_observer import open_tracer
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.call_times import LegTimes
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica.errors import ConfigError
from shoal_replica.request import FinishReason

START_S = 1_700_000_000.0
PARENT = TraceContext(
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736", span_id="00f067aa0ba902b7", sampled=True, state="v=1"
)
RESUMED = CallRecord(
    request_id="call",
    outcome=RequestOutcome.FINISHED,
    time_s=START_S,
    arrived_s=100.0,
    ended_s=103.0,
    ttft_s=0.9,
    usage=Usage(
        num_prompt_tokens=7, num_cached_tokens=4, num_output_tokens=3, replica_id="b", ttft_s=0.9, num_resumes=1
    ),
    finish_reasons=(FinishReason.LENGTH,),
    is_chat=True,
    trace=PARENT,
    legs=(
        LegTimes(
            100.25,
            "a",
            routed_s=100.5,
            queue_s=0.25,
            prefill_s=0.125,
            first_token_s=101.0,
            last_token_s=101.5,
            end="lost",
        ),
        LegTimes(101.75, "b", routed_s=102.0, queue_s=9.0, prefill_s=9.0, first_token_s=102.5, last_token_s=103.0),
    ),
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def send(collector: Collector, *records: CallRecord, **settings: float) -> None:
    tracer = open_tracer(TraceSettings(otlp_endpoint=collector.endpoint, **settings), "tiny", "g0")
    assert tracer is not None
    for record in records:
        tracer.take(record)
    tracer.close()


def seconds(unix_nano: int) -> float:
    """Since ``START_S``, rounded to 10 us: a float of Unix time does not resolve nanoseconds."""
    return round(unix_nano / 1e9 - START_S, 5)


def test_a_resumed_call_shows_both_placements(collector: Collector) -> None:
    send(collector, RESUMED)
    root, *steps = sorted(collector.trace(PARENT.trace_id), key=lambda s: s.parent_span_id.hex() != PARENT.span_id)
    assert root.parent_span_id.hex() == PARENT.span_id
    assert root.trace_state == PARENT.state
    assert {span.parent_span_id for span in steps} == {root.span_id}
    times = [
        (s.name, seconds(s.start_time_unix_nano), seconds(s.end_time_unix_nano), attributes(s)) for s in (root, *steps)
    ]
    leg_a = {"shoal.leg": 1, "shoal.replica_id": "a", "shoal.leg.end": "lost"}
    leg_b = {"shoal.leg": 2, "shoal.replica_id": "b"}
    assert times == [
        (
            "generate",
            0.0,
            3.0,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "tiny",
                "gen_ai.server.time_to_first_token": 0.9,
                "gen_ai.response.finish_reasons": ["length"],
                "gen_ai.usage.input_tokens": 7,
                "gen_ai.usage.output_tokens": 3,
                "shoal.request_id": "call",
                "shoal.outcome": "finished",
                "shoal.num_cached_tokens": 4,
                "shoal.num_resumes": 1,
            },
        ),
        ("admit", 0.0, 0.25, {}),
        ("route", 0.25, 0.5, leg_a),
        ("queue", 0.5, 0.75, leg_a),
        ("prefill", 0.75, 0.875, leg_a),  # then its token is on its way
        ("decode", 1.0, 1.5, leg_a),
        ("route", 1.75, 2.0, leg_b),
        ("queue", 2.0, 2.5, leg_b),  # its wait cannot outlast its first token
        ("prefill", 2.5, 2.5, leg_b),
        ("decode", 2.5, 3.0, leg_b),
    ]


def test_a_call_that_got_nowhere_has_an_end_and_an_error(collector: Collector) -> None:
    waiting = LegTimes(100.5)
    shed = CallRecord(
        request_id="a", outcome=RequestOutcome.SHED, time_s=START_S, arrived_s=100.0, ended_s=101.0, error="Full"
    )
    send(collector, shed, replace(shed, request_id="b", outcome=RequestOutcome.CANCELLED, error="", legs=(waiting,)))
    roots = {attributes(s)["shoal.request_id"]: s for s in collector.spans if s.name == "generate"}
    assert (roots["a"].status.code, roots["b"].status.code) == (2, 0)
    assert attributes(roots["a"])["error.type"] == "Full"
    assert {s.name for s in collector.trace(roots["a"].trace_id.hex())} == {"generate", "admit"}
    assert {s.name for s in collector.trace(roots["b"].trace_id.hex())} == {"generate", "admit", "route"}


def test_a_refused_placement_ends_where_the_next_begins(collector: Collector) -> None:
    refused = LegTimes(100.25, "a", ended_s=100.5, end="refused")
    send(collector, replace(RESUMED, legs=(refused, RESUMED.legs[1])))
    routes = [span for span in collector.trace(PARENT.trace_id) if span.name == "route"]
    times = [(seconds(span.start_time_unix_nano), seconds(span.end_time_unix_nano)) for span in routes]
    assert sorted(times) == [(0.25, 0.5), (1.75, 2.0)]


def test_the_caller_decides_what_is_sampled_and_the_share_decides_the_rest(collector: Collector) -> None:
    untraced = replace(RESUMED, trace=None)
    unsampled = replace(RESUMED, trace=replace(PARENT, sampled=False))
    send(collector, unsampled)
    send(collector, untraced, unsampled, RESUMED, sampled_share=0.0)
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT.trace_id}


def test_without_an_endpoint_nothing_is_loaded() -> None:
    code = (
        "import sys; from shoal_cluster.config import TraceSettings; "
        "from shoal_cluster.serve.call_observer import open_tracer; "
        "assert open_tracer(TraceSettings(), 'm', 'g') is None; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_exporter_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal_cluster.serve.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"^traces\.otlp_endpoint: needs .* pip install -e '\.\[otel\]'$"):
        open_tracer(TraceSettings(otlp_endpoint="http://127.0.0.1:1"), "m", "g")
