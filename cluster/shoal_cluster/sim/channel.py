"""Messages between the two processes of a parallel run."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from shoal_replica.frames import FrameReader, frame

CHUNK_BYTES, MAX_BYTES = 2**18, 2**31

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
        self._reader: FrameReader[Message] = FrameReader(msgspec.msgpack.Decoder(kind), MAX_BYTES)
        self._come: deque[Message] = deque()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, and read incoming data while the send buffer is full: two ends that both only write would
        deadlock.

        Raises:
            EOFError, ConnectionError: the other end is gone.
        """
        rest = memoryview(frame(message))
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                (_, can_do), *_ = self._poll.poll()
                if can_do & select.POLLIN:
                    self._take()

    def receive(self) -> Message:
        """Wait for the next message. Raises as ``send`` does."""
        while not self._come:
            self._take()
        return self._come.popleft()

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
        self._come.extend(self._reader.take(come))
