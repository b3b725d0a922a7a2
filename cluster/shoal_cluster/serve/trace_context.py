"""The trace that a request belongs to, as clients send it: the W3C headers ``traceparent`` and ``tracestate``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_STATE_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Ids in lower-case hexadecimal; ``span_id`` is the caller's span."""

    trace_id: str
    span_id: str
    sampled: bool = False
    state: str = ""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The context as headers that a caller sends."""
        parent = ("traceparent", f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}")
        return (parent, ("tracestate", self.state)) if self.state else (parent,)


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """The context in ``headers`` (names in lower case), or None. A malformed one is ignored, as the W3C asks."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = headers.get("tracestate", "")
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        sampled=bool(int(flags, 16) & 1),
        state=state if len(state) <= MAX_STATE_CHARS else "",
    )
