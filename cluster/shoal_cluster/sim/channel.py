"""Messages between the two processes of a run."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

LENGTH_BYTES, CHUNK_BYTES = 4, 2**18

SPIN_S = 0.002
"""Who waits asks again and again for so long before it sleeps: to be woken takes as long as a window does."""

Message = TypeVar("Message")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Channel(Generic[Message]):
    """One side of a pair of sockets: frames of msgpack behind their length.

    Args:
        kind: what comes from the other side.
    """

    def __init__(self, side: socket.socket, kind: Any) -> None:
        self._socket = side
        self._poll = select.poll()
        self._poll.register(side, select.POLLIN | select.POLLOUT)
        self._spin_s = SPIN_S if num_cores() > 1 else 0.0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._come = b""

    def send(self, message: msgspec.Struct) -> None:
        """Takes what comes while there is no room: else two that send much to each other would wait for ever.

        Raises:
            EOFError, ConnectionError: the other side has gone.
        """
        body = self._encode(message)
        rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                (_, can_do), *_ = self._poll.poll()
                if can_do & select.POLLIN:
                    self._take()

    def receive(self) -> Message:
        """The next message, once it is here. Raises as ``send`` does."""
        while len(self._come) < LENGTH_BYTES:
            self._take()
        end = LENGTH_BYTES + int.from_bytes(self._come[:LENGTH_BYTES], "big")
        while len(self._come) < end:
            self._take()
        body, self._come = self._come[LENGTH_BYTES:end], self._come[end:]
        message: Message = self._decode(body)
        return message

    def _take(self) -> None:
        give_up_s = time.perf_counter() + self._spin_s
        come = None
        while come is None:
            try:
                come = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() > give_up_s:
                    come = self._socket.recv(CHUNK_BYTES)
                else:
                    os.sched_yield()  # where others want the cores, the other side may be waiting for this one
        if not come:
            raise EOFError("the other process has gone")
        self._come += come
