"""JSON as HTTP routes send it: whole, or as server-sent events."""

from __future__ import annotations

import json
from typing import Any

import msgspec

Json = dict[str, Any]

_encoder = msgspec.json.Encoder()
_LINE_ENDS = tuple((end.encode(), json.dumps(end)[1:-1].encode()) for end in "\x85\u2028\u2029")


def encode(body: Json) -> bytes:
    """As JSON."""
    return _encoder.encode(body)


def event(body: Json, kind: str = "") -> bytes:
    """One server-sent event; of a kind, if a client tells kinds apart by the event's name. What some clients take for
    the end of a line, because Unicode does, is escaped.
    """
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    data = encode(body)
    if not data.isascii():
        for end, escape in _LINE_ENDS:
            data = data.replace(end, escape)
    return name + b"data: " + data + b"\n\n"
