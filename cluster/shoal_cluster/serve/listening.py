"""Ends an asyncio server without losing a connection that it is accepting."""

from __future__ import annotations

import asyncio


async def stop_listening(server: asyncio.Server) -> None:
    """Close ``server``. Connections that it has accepted by then are made, and others refused.

    ``Server.close`` alone would lose one that was accepted a moment ago: its socket stays open and nobody reads it, so
    that its peer waits (https://github.com/python/cpython/issues/109564).
    """
    loop = asyncio.get_running_loop()
    try:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)  # for the server's tasks that attach what was accepted
    finally:
        server.close()
