"""Messages between the two processes of a run."""

from __future__ import annotations

import select
import socket
from typing import Any, Generic, TypeVar

import msgspec

LENGTH_BYTES, CHUNK_BYTES = 4, 2**18

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """One side of a pair of sockets: frames of msgpack behind their length.

    Args:
        kind: what comes from the other side.
    """

    def __init__(self, side: socket.socket, kind: Any) -> None:
        self._socket = side
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._come = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Takes what comes while there is no room: else two that send much to each other would wait for ever.

        Raises:
            EOFError, ConnectionError: the other side has gone.
        """
        body = self._encode(message)
        rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        while rest:
            can_read, can_write, _ = select.select([self._socket], [self._socket], [])
            if can_write:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            elif can_read:
                self._take()

    def receive(self) -> Message:
        """The next message, once it is here. Raises as ``send`` does."""
        while len(self._come) < LENGTH_BYTES:
            self._take()
        end = LENGTH_BYTES + int.from_bytes(self._come[:LENGTH_BYTES], "big")
        while len(self._come) < end:
            self._take()
        body = bytes(self._come[LENGTH_BYTES:end])
        del self._come[:end]
        return self._decoder.decode(body)

    def _take(self) -> None:
        come = self._socket.recv(CHUNK_BYTES)
        if not come:
            raise EOFError("the other process has gone")
        self._come += come
