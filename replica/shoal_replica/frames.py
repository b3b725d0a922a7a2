"""Messages on a stream of bytes: msgpack, each behind its length. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

LENGTH_BYTES = 4

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as it is sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(length: bytes | bytearray, max_bytes: int) -> int:
    """How long a frame's message is, from its length. Raises ConnectionError if that is over ``max_bytes``."""
    size = int.from_bytes(length, "big")
    if size > max_bytes:
        raise ConnectionError(f"a frame of {size} bytes is over {max_bytes}")
    return size


class FrameReader(Generic[Message]):
    """Takes bytes as they arrive and yields the messages that are complete, of at most ``max_bytes`` each, which may
    change.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message], max_bytes: int) -> None:
        self._decode = decoder.decode
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def take(self, data: bytes) -> Iterator[Message]:
        """Raises ConnectionError if a frame is too large, msgspec.DecodeError if it holds no message."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= LENGTH_BYTES:
                body = start + LENGTH_BYTES
                end = body + body_bytes(buffer[start:body], self.max_bytes)
                if len(buffer) < end:
                    return
                start = end
                yield self._decode(buffer[body:end])
        finally:
            del buffer[:start]
