"""JSON as HTTP routes send it: whole, or as server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]

_encoder = msgspec.json.Encoder()


def encode(body: Json) -> bytes:
    """As JSON."""
    return _encoder.encode(body)


def event(body: Json, kind: str = "") -> bytes:
    """One server-sent event; of a kind, if a client tells kinds apart by the event's name."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + encode(body) + b"\n\n"
