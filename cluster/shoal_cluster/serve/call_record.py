"""What is left of a call when it is over: how it ended, its numbers and times, but nothing of its content."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_cluster.serve.call import Usage
from shoal_cluster.serve.call_times import LegTimes
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica.request import FinishReason


class RequestOutcome(StrEnum):
    """How a request ended at the gateway."""

    FINISHED = "finished"
    SHED = "shed"  # refused for want of room
    FAILED = "failed"
    DEADLINE = "deadline"  # not finished in time
    INVALID = "invalid"  # the client's own mistake
    CANCELLED = "cancelled"  # the client left


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A call that is over.

    Attributes:
        arrived_s, ended_s: the gateway's monotonic clock. ``time_s`` is the Unix time of the arrival.
        model: the one asked for, or one of its adapters; "" for the model that is served.
        usage: None when it ended before its placement began.
        error: type of the error that ended it; empty when it finished.
        legs: its placements, oldest first.
    """

    request_id: str
    outcome: RequestOutcome
    time_s: float
    arrived_s: float
    ended_s: float
    ttft_s: float | None = None
    inter_token_s: float = 0.0
    usage: Usage | None = None
    finish_reasons: tuple[FinishReason, ...] = ()
    error: str = ""
    model: str = ""
    is_chat: bool = False
    tenant: str = ""
    trace: TraceContext | None = None
    legs: tuple[LegTimes, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def placement_s(self) -> float | None:
        """From its arrival until it went to the first replica that took it; None if none did."""
        routed_s = next((leg.routed_s for leg in self.legs if leg.routed_s is not None), None)
        return None if routed_s is None else routed_s - self.arrived_s
