"""No connection is lost because its server stops listening."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fixtures.replicas import Replica, replica
from fixtures.waiting import DEADLINE_S

from shoal_cluster.serve.listening import stop_listening


@asynccontextmanager
async def client(address: tuple[str, int]) -> AsyncIterator[socket.socket]:
    """A connection that the server has not accepted yet."""
    with socket.create_connection(address) as connection:
        connection.setblocking(False)
        yield connection


async def ends(connection: socket.socket) -> bool:
    """Whether the server ends it, rather than leaving it to time out."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return not await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("num_turns", range(6))
async def test_what_was_accepted_is_made(num_turns: int) -> None:
    """Wherever the server is with a connection when it stops: the loop has taken so many turns since it was asked for
    one. ``Server.close`` alone loses it in one of these cases.
    """
    made = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set()
            transport.close()

    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    async with client(address) as connection:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await stop_listening(server)
        assert await ends(connection)
        assert made.is_set() == (num_turns > 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    gc.collect()  # says so if a socket was lost


STOPS: dict[str, tuple[str, Callable[[Replica], Awaitable[None]]]] = {
    "feed": ("address", lambda one: one.feed.stop()),
    "blocks": ("blocks_address", lambda one: one.block_server.close()),
}


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("num_turns", range(6))
async def test_a_replica_that_stops_ends_every_connection(kind: str, num_turns: int) -> None:
    name, stop = STOPS[kind]
    async with replica() as one, client(getattr(one, name)) as connection:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await stop(one)
        assert await ends(connection)
    gc.collect()
