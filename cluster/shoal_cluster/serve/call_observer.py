"""Observes every call from its arrival to its end, however that comes, and reports once what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shoal_cluster.config import MAX_MODEL_NAME, TraceSettings
from shoal_cluster.serve.call import Chunk, GenerateCall, Usage
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.call_times import CallTimes
from shoal_cluster.serve.journal import EventKind, Journal
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, ShoalError, Unavailable
from shoal_replica.request import FinishReason

if TYPE_CHECKING:
    from shoal_cluster.serve.tracing import CallTracer


CUT_S = 1.0
"""Within this time a call that was cut has told its client."""

MARGIN_S = 0.05
"""A client that leaves so shortly before its deadline, or in the last tenth of a short one, has left because of it: its
clock began earlier than ours.
"""


class CallWatch:
    """One call while it runs. ``usage`` and ``fail``, which ends it with an error, are set once it is a generation."""

    __slots__ = ("call", "fail", "finish_reasons", "time_s", "times", "usage")

    def __init__(self, call: GenerateCall, times: CallTimes) -> None:
        self.call = call
        self.times = times
        self.time_s = time.time()
        self.usage: Callable[[], Usage] | None = None
        self.fail: Callable[[BaseException], None] | None = None
        self.finish_reasons: list[FinishReason] = []

    def take(self, chunk: Chunk) -> None:
        """Note a chunk that goes to the client."""
        if chunk.finish_reason is not None:
            self.finish_reasons.append(chunk.finish_reason)

    def record(self, outcome: RequestOutcome, error: BaseException | None) -> CallRecord:
        return CallRecord(
            request_id=self.call.request_id,
            model=self.call.model[:MAX_MODEL_NAME],  # a client may ask for anything
            outcome=outcome,
            time_s=self.time_s,
            arrived_s=self.times.arrived_s,
            ended_s=time.monotonic(),
            ttft_s=self.times.ttft_s,
            inter_token_s=self.times.inter_token_s,
            usage=None if self.usage is None else self.usage(),
            finish_reasons=tuple(self.finish_reasons),
            error="" if error is None else type(error).__name__,
            legs=tuple(self.times.legs),
            is_chat=self.call.messages is not None,
            tenant=self.call.tenant,
            trace=self.call.trace,
        )


class CallObserver:
    """Counts calls, notes refused and failed ones in the journal, and hands each call's record to ``listeners``."""

    def __init__(
        self, metrics: GatewayMetrics, journal: Journal, listeners: tuple[Callable[[CallRecord], None], ...] = ()
    ) -> None:
        self._metrics = metrics
        self._journal = journal
        self._listeners = listeners
        self._open: set[CallWatch] = set()
        self._are_done = asyncio.Event()  # none is open
        self._are_done.set()

    @contextmanager
    def observe(self, call: GenerateCall) -> Iterator[CallWatch]:
        """Context for a call's whole life. What is raised inside passes through."""
        self._metrics.num_active += 1
        watch = CallWatch(call, CallTimes(time.monotonic(), call.sampling_params.n, self._metrics))
        outcome, error = RequestOutcome.FINISHED, None
        self._open.add(watch)
        self._are_done.clear()
        try:
            yield watch
        except BaseException as caught:
            error = _why(call, time.monotonic() - watch.times.arrived_s, caught)
            outcome = outcome_of(error)
            raise
        finally:
            self._metrics.num_active -= 1
            self._open.discard(watch)
            if not self._open:
                self._are_done.set()
            self._end(watch.record(outcome, error), error)

    async def drain(self, timeout_s: float) -> None:
        """Return once no call is open: those that still are after ``timeout_s`` end with Unavailable."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._are_done.wait(), timeout_s)
        error = Unavailable(f"this gateway has stopped, and the answer was not finished within {timeout_s:g} s")
        for watch in tuple(self._open):
            if watch.fail is not None:
                watch.fail(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._are_done.wait(), CUT_S)

    def _end(self, record: CallRecord, error: BaseException | None) -> None:
        self._metrics.add_call(record)
        if record.outcome in (RequestOutcome.SHED, RequestOutcome.FAILED, RequestOutcome.DEADLINE):
            kind = EventKind.REFUSED if record.outcome is RequestOutcome.SHED else EventKind.FAILED
            told = f": {error}" if isinstance(error, ShoalError) else ""  # others may quote the prompt
            self._journal.note(kind, record.error + told, request_id=record.request_id)
        for listener in self._listeners:
            listener(record)


def _why(call: GenerateCall, waited_s: float, caught: BaseException) -> BaseException:
    """What ended a call: gRPC mostly cancels one at its client's deadline before the timer here has passed."""
    is_cancelled = outcome_of(caught) is RequestOutcome.CANCELLED
    if is_cancelled and call.timeout_s is not None and waited_s >= call.timeout_s - min(MARGIN_S, call.timeout_s / 10):
        return DeadlineExceeded(f"the request was not finished after {call.timeout_s:g} s")
    return caught


def outcome_of(error: BaseException) -> RequestOutcome:
    """The outcome of a call that ends with ``error``."""
    match error:
        case ResourceExhausted():
            return RequestOutcome.SHED
        case DeadlineExceeded():
            return RequestOutcome.DEADLINE
        case InvalidArgument() | NotFound():
            return RequestOutcome.INVALID
        case asyncio.CancelledError() | GeneratorExit():
            return RequestOutcome.CANCELLED
        case _:
            return RequestOutcome.FAILED


def open_tracer(settings: TraceSettings, model: str, gateway_id: str) -> CallTracer | None:
    """A tracer, if an endpoint is set. Raises ConfigError if OpenTelemetry is missing."""
    if settings.otlp_endpoint is None:
        return None
    from shoal_cluster.serve.tracing import CallTracer  # OpenTelemetry's exporter is an extra

    return CallTracer(settings.otlp_endpoint, settings.sampled_share, model, gateway_id)
