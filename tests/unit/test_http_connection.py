"""Connections that wait for the rest of a request end; all others live as uvicorn lets them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.serve.http import connection
from shoal_cluster.serve.http.connection import MAX_HEAD_BYTES, PatientProtocol

Send = Callable[[bytes], Awaitable[None]]
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class App:
    """Answers with the number of bytes of the body, once ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.num_left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return
            body, more = body + message["body"], message["more_body"]
        await self.go.wait()
        answer = str(len(body)).encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[tuple[uvicorn.Server, asyncio.StreamReader, Send]]:
    """A server, and a connection to it."""
    config = uvicorn.Config(app, http=PatientProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    reader, writer = await asyncio.open_connection(*listener.getsockname())

    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    try:
        yield server, reader, send
    finally:
        writer.transport.abort()
        server.should_exit = True
        await serving


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"POST / HTTP/1.1\r\nhos", HEAD, HEAD + b"abc", CHUNKED + b"3\r\nabc\r\n0\r\nx"]
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_one_that_stops_amid_a_request_is_ended(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, is_first: bool
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.25)
    app = App()
    async with served(app) as (server, reader, send):
        if not is_first:
            await send(HEAD + b"0123456789")
            assert await answer(reader) == b"10"
        await send(sent)
        if sent or is_first:
            assert await rest(reader) == b""
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)
            assert app.num_left == (b"\r\n\r\n" in sent)
        else:  # an idle one is kept for uvicorn's own time
            await asyncio.sleep(0.5)
            await send(HEAD + b"0123456789")
            assert await answer(reader) == b"10"


async def test_one_that_sends_slowly_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 1.5)
    async with served(App()) as (_, reader, send):
        for idle_s in (0.0, 2.0):
            await asyncio.sleep(idle_s)
            await send(HEAD)
            for piece in range(10):
                await asyncio.sleep(0.2)
                await send(b"%d" % piece)
            assert await answer(reader) == b"10"


async def test_one_that_waits_for_a_slow_answer_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.2)
    app, size = App(), 300_000
    app.go.clear()
    async with served(app) as (_, reader, send):
        await send(HEAD + b"0123456789")
        # The next request is not read to its end before the first is answered.
        following = asyncio.create_task(send(HEAD.replace(b"10", b"%d" % size) + b"x" * size))
        await asyncio.sleep(0.7)
        app.go.set()
        assert await answer(reader) == b"10"
        assert await answer(reader) == b"%d" % size
        await following


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 1000),
        (b"GET / HTTP/1.1\r\na: ", b"b" * 6000),
        (b"GET /", b"b" * 6000),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", b"a: b\r\n" * 1000),
    ],
)
async def test_a_head_without_end_is_refused(begin: bytes, piece: bytes) -> None:
    async with served(App()) as (server, reader, send):
        told = asyncio.create_task(rest(reader))
        num_sent = 0
        try:
            await send(begin)
            while not told.done():
                await send(piece)
                num_sent += len(piece)
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert num_sent < 10 * MAX_HEAD_BYTES + 8 * 2**20  # sockets hold some of it
        assert (await told)[:12] in (b"HTTP/1.1 400", b"")  # a client that goes on sending may not see it
        await until(lambda: not server.server_state.connections)


async def test_a_refusal_does_not_come_amid_the_answer_to_the_request_before() -> None:
    has_begun = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9999")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        has_begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(endless) as (server, reader, send):
        await send(HEAD + b"0123456789")
        await has_begun.wait()
        told = asyncio.create_task(rest(reader))
        with suppress(ConnectionError):
            await send(b"GET /" + b"b" * MAX_HEAD_BYTES)
        answered = await told
        assert answered.startswith(b"HTTP/1.1 200") or not answered
        assert b"HTTP/1.1 400" not in answered
        await until(lambda: not server.server_state.connections)


async def test_large_bodies_and_many_chunks_are_no_heads() -> None:
    async with served(App()) as (_, reader, send):
        await send(HEAD.replace(b"10", b"%d" % 10**6) + b"x" * 10**6)
        assert await answer(reader) == b"1000000"
        await send(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert await answer(reader) == b"100000"
