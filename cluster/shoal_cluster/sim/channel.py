"""Messages between the two processes of a parallel run."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

LENGTH_BYTES, CHUNK_BYTES = 4, 2**18

SPIN_S = 0.002
"""How long a reader polls before it blocks: a wake-up takes as long as a whole window."""

Message = TypeVar("Message")


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Channel(Generic[Message]):
    """One end of a socket pair: msgpack frames, each behind its length.

    Args:
        kind: type of the messages that the other end sends.
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
        """Send a message, and read incoming data while the send buffer is full: two ends that both only write would
        deadlock.

        Raises:
            EOFError, ConnectionError: the other end is gone.
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
        """Wait for the next message. Raises as ``send`` does."""
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
                    os.sched_yield()  # on busy cores the other process may be waiting for this one
        if not come:
            raise EOFError("the other process has gone")
        self._come += come
