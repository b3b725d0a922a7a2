"""The benchmark's gRPC client on a bare socket against a real server: all messages, call after call, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from shoal_cluster.bench.wire_client import MAX_BODY, WireClient

METHOD = "/test.Echo/Repeat"
SIZES = (0, 1, 100, 16_384, 70_000)


async def repeat(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    """Yield the request, then repetitions of it cut to each of ``SIZES``; for an empty one, only an error status."""
    await context.send_initial_metadata((("x-request-id", "some"),))
    if not raw:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "empty")
    yield raw
    for size in SIZES:
        yield (raw * (1 + size // len(raw)))[:size]


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[grpc.aio.Server, WireClient]]:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(repeat)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Repeat": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = await WireClient.connect("127.0.0.1", port, METHOD)
    try:
        async with asyncio.timeout(20):
            yield server, client
    finally:
        client.close()
        await server.stop(0)


async def test_every_message_of_every_call_comes_whole() -> None:
    async with connected() as (_, client):
        for number, size in enumerate((1, 300, 20_000, MAX_BODY, MAX_BODY, MAX_BODY)):  # more than a window in all
            body = bytes([number]) * size
            messages = [message async for message in client.call(body)]
            assert messages == [body, *(bytes([number]) * size for size in SIZES)]


async def test_a_call_that_is_refused_ends_without_a_message_and_the_next_one_runs() -> None:
    async with connected() as (_, client):
        assert [message async for message in client.call(b"")] == []
        assert len([message async for message in client.call(b"x")]) == 1 + len(SIZES)


async def test_a_server_that_stops_is_told() -> None:
    async with connected() as (server, client):
        await server.stop(0)
        with pytest.raises(ConnectionError, match="not answered"):
            [message async for message in client.call(b"x")]


async def test_a_body_that_no_window_holds_is_named() -> None:
    async with connected() as (_, client):
        with pytest.raises(ValueError, match=f"at most {MAX_BODY}"):
            [message async for message in client.call(bytes(MAX_BODY + 1))]
