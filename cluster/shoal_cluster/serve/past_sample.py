"""A bucket of what a replica remembers of its past, as it is told to gateways."""

from __future__ import annotations

import msgspec

PAST_S = 6 * 3600.0  # so long is remembered, by replicas and by gateways
PAST_BUCKET_S = 20.0


class PastSample(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A bucket of ``PAST_BUCKET_S`` seconds: rates are means, loads are peaks. ``time_s`` (Unix time) is its end."""

    time_s: float
    tokens_per_s: float
    num_allocated_blocks: int
    num_total_blocks: int
    num_waiting: int
    num_waiting_tokens: int


def decode_past(body: bytes) -> list[PastSample]:
    """Decode what ``ReplicaPast.encoded`` made. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=list[PastSample])
