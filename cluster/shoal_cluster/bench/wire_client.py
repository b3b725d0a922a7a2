"""gRPC calls over a bare socket, one at a time: a client library would add half a millisecond to the server's time.

Implements as much of HTTP/2 as such a call needs (RFC 9113, and the literals of HPACK, RFC 7541). Trailers are not
read: the caller knows how much to expect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SETTING = (4).to_bytes(2, "big")
DEFAULT_WINDOW, MAX_WINDOW, MAX_FRAME = 2**16 - 1, 2**31 - 1, 2**14
FRAME_HEAD, MESSAGE_HEAD = 9, 5
MAX_BODY = DEFAULT_WINDOW - MESSAGE_HEAD


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def header_block(path: str) -> bytes:
    """The headers of a gRPC call, each as an HPACK literal without indexing."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    texts = ((name.encode(), value.encode()) for name, value in headers.items())
    return b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in texts)


class WireClient(asyncio.Protocol):
    """A connection for calls of one server-streaming method. Made by ``connect``."""

    def __init__(self, path: str) -> None:
        self._head = header_block(path)
        self._next_id = 1
        self._buffer = b""
        self._body = b""  # start of an incomplete message of the response
        self._messages: deque[bytes] = deque()
        self._is_over = True
        self._window = DEFAULT_WINDOW  # send window of the connection; a stream's own is never smaller
        self._lost: Exception | None = None
        self._news = asyncio.Event()
        self._transport: asyncio.Transport

    @classmethod
    async def connect(cls, host: str, port: int, path: str) -> WireClient:
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(path), host, port)
        return client

    async def call(self, body: bytes) -> AsyncIterator[bytes]:
        """Yield the response messages as they arrive; iterate to the end before the next call.

        Raises:
            ValueError: ``body`` does not fit into the default initial window.
            ConnectionError: the server has reset the call or closed the connection.
        """
        if len(body) > MAX_BODY:
            raise ValueError(f"body: got {len(body)} bytes; must be at most {MAX_BODY}")
        sent = bytes(1) + len(body).to_bytes(MESSAGE_HEAD - 1, "big") + body
        while self._window < len(sent):
            await self._hear()
        stream_id, self._next_id, self._is_over = self._next_id, self._next_id + 2, False
        self._window -= len(sent)
        pieces = [sent[start : start + MAX_FRAME] for start in range(0, len(sent), MAX_FRAME)]
        data = (frame(DATA, END_STREAM * (piece is pieces[-1]), stream_id, piece) for piece in pieces)
        self._transport.write(frame(HEADERS, END_HEADERS, stream_id, self._head) + b"".join(data))
        while self._messages or not self._is_over:
            if self._messages:
                yield self._messages.popleft()
            else:
                await self._hear()

    def close(self) -> None:
        self._transport.close()

    async def _hear(self) -> None:
        if self._lost is not None:
            raise ConnectionError(f"the call was not answered: {self._lost}") from self._lost
        self._news.clear()
        await self._news.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        window = INITIAL_WINDOW_SETTING + MAX_WINDOW.to_bytes(4, "big")
        more = (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")
        opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, window) + frame(WINDOW_UPDATE, 0, 0, more)
        self._transport.write(opening)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        start = 0
        while len(buffer) - start >= FRAME_HEAD:
            end = start + FRAME_HEAD + int.from_bytes(buffer[start : start + 3], "big")
            if len(buffer) < end:
                break
            kind, flags, stream_id = (
                buffer[start + 3],
                buffer[start + 4],
                int.from_bytes(buffer[start + 5 : start + 9], "big"),
            )
            self._take(kind, flags, stream_id, buffer[start + FRAME_HEAD : end])
            start = end
        self._buffer = buffer[start:]
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._lost or exc or ConnectionResetError("the server has closed the connection")
        self._news.set()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id not in (0, self._next_id - 2):  # late frames of an earlier call
            return
        if kind == DATA:
            self._body += payload
            while len(self._body) >= MESSAGE_HEAD:
                end = MESSAGE_HEAD + int.from_bytes(self._body[1:MESSAGE_HEAD], "big")
                if len(self._body) < end:
                    break
                self._messages.append(self._body[MESSAGE_HEAD:end])
                self._body = self._body[end:]
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == WINDOW_UPDATE and stream_id == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == GOAWAY or (kind == RST_STREAM and not self._is_over):
            self._lost = ConnectionResetError(f"frame {kind}: {payload.hex()}")
        self._is_over |= kind in (DATA, HEADERS) and bool(flags & END_STREAM)
