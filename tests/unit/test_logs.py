"""One log line for each request, with its figures and none of its text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from shoal_cluster.chat.message import Message
from shoal_cluster.serve.call import GenerateCall, Usage
from shoal_cluster.serve.call_observer import CallObserver
from shoal_cluster.serve.http.errors import logged_report
from shoal_cluster.serve.journal import Journal
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.logs import ROOTS, LineFormatter, fields, log_call, log_unread, set_up_logs
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_cluster.serve.trace_context import trace_context
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from shoal_replica.request import FinishReason, StartTimes
from shoal_replica.sampling_params import SamplingParams

SECRET = "the-treasure-is-under-the-old-oak"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Restore the loggers afterwards."""
    loggers = [logging.getLogger(name) for name in ROOTS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def observer() -> CallObserver:
    metrics = GatewayMetrics("g0", ("tiny",), LatencyWindow(LatencyTargets()))
    return CallObserver(metrics, Journal(), (log_call,))


def secret_call(request_id: str = "call") -> GenerateCall:
    return GenerateCall(
        request_id=request_id,
        sampling_params=SamplingParams(stop=(SECRET,)),
        messages=(Message("user", SECRET),),
        tenant="acme",
        trace=trace_context({"traceparent": TRACEPARENT}),
    )


def test_a_finished_request_is_one_line_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info", process="gateway")
    with observer().observe(secret_call()) as watch:
        start_s = watch.times.arrived_s
        leg = watch.times.start_leg(start_s + 0.1)
        leg.replica_id, leg.routed_s = "r1", start_s + 0.25
        leg.take(StartTimes(0.5, 0.25), start_s + 1.0)
        for moment_s in (1.0, 1.2, 1.4):
            watch.times.take(0, 1, start_s + moment_s)
        watch.finish_reasons.append(FinishReason.STOP)
        watch.usage = lambda: Usage(
            num_prompt_tokens=7, num_cached_tokens=4, num_output_tokens=3, replica_id="r1", ttft_s=1.0, num_resumes=0
        )
    (line,) = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert line.pop("time").endswith("+00:00")
    assert line.pop("duration_s") >= 0
    assert line == {
        "level": "info",
        "logger": "shoal_cluster.requests",
        "message": "request finished",
        "process": "gateway",
        "request_id": "call",
        "trace_id": TRACE_ID,
        "tenant": "acme",
        "outcome": "finished",
        "finish_reasons": ["stop"],
        "replica_id": "r1",
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_output_tokens": 3,
        "num_resumes": 0,
        "placement_s": 0.25,
        "queue_s": 0.5,
        "ttft_s": 1.0,
        "inter_token_s": 0.2,
    }


ERRORS = [
    None,
    InvalidArgument("prompt", SECRET, f"must not be {SECRET}"),
    ResourceExhausted(f"no room for {SECRET}"),
    DeadlineExceeded(f"{SECRET} took too long"),
    ValueError(f"cannot parse {SECRET}"),
    KeyError(SECRET),
    UnicodeEncodeError("utf-8", SECRET, 0, 1, "surrogates not allowed"),
]


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_words_of_a_request_are_logged_at_any_level(
    form: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in our own lines nor in what another handler would make of the records."""
    set_up_logs(form, "debug")
    for name in ROOTS:
        logging.getLogger(name).addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG)
    watched = observer()
    for number, error in enumerate(ERRORS):
        try:
            with watched.observe(secret_call(f"call-{number}")):
                if error is not None:
                    raise error
        except Exception as caught:
            logged_report(caught, f"call-{number}")  # as both APIs do with an error
    said = capsys.readouterr().err
    for number in range(len(ERRORS)):
        assert f"call-{number}" in said
    assert said.count("stack") == 3, "where an internal error came from is told"
    assert SECRET not in said
    assert SECRET not in caplog.text


def test_a_request_of_which_nothing_is_known_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info", gateway_id="g")
    log_unread("abc", "InvalidArgument")
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told.pop("time")
    assert told == {
        "level": "info",
        "logger": "shoal_cluster.requests",
        "message": "request invalid",
        "gateway_id": "g",
        "request_id": "abc",
        "outcome": "invalid",
        "error": "InvalidArgument",
    }


def test_the_level_is_kept_and_set_up_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info")
    set_up_logs("text", "warning", process="replica")
    logging.getLogger("shoal_replica.engine").info("not this")
    logging.getLogger("shoal_replica.engine").warning("this\nin one line", extra=fields(step=3))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"shoal_replica.engine this\nin one line process='replica' step=3")


def test_what_fails_outside_requests_is_told_whole() -> None:
    try:
        raise RuntimeError("the disk is full")
    except RuntimeError as error:
        record = logging.LogRecord("shoal_replica", logging.ERROR, "", 0, "a step failed", (), (None, error, None))
    line = json.loads(LineFormatter("json", {}).format(record))
    assert "the disk is full" in line["exception"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (TRACEPARENT, (TRACE_ID, "00f067aa0ba902b7", True)),
        (TRACEPARENT[:-2] + "00", (TRACE_ID, "00f067aa0ba902b7", False)),
        (TRACEPARENT.replace("00-", "cc-", 1) + "-what-the-future-brings", (TRACE_ID, "00f067aa0ba902b7", True)),
        (TRACEPARENT + "-more", None),
        (TRACEPARENT.replace("00-", "ff-", 1), None),
        (TRACEPARENT.upper(), None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        ("", None),
        ("00-1-1-01", None),
    ],
)
def test_a_traceparent_is_read_as_w3c_says(header: str, expected: tuple[str, str, bool] | None) -> None:
    context = trace_context({"traceparent": header, "tracestate": "vendor=1"})
    assert expected == (None if context is None else (context.trace_id, context.span_id, context.sampled))
    assert context is None or context.state == "vendor=1"
