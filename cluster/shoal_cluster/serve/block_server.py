"""Gives a replica's cached blocks to other replicas."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from shoal_cluster.serve.block_wire import (
    PIECE_BYTES,
    PIECE_BYTES_BETWEEN_STEPS,
    BlocksWanted,
    Coming,
    receive,
    send_blocks,
)
from shoal_cluster.serve.listening import stop_listening
from shoal_cluster.serve.logs import error_fields, fields
from shoal_replica.block_exchange import BlockExchange
from shoal_replica.errors import ShoalError
from shoal_replica.frames import frame

MAX_AT_ONCE = 8
"""So many replicas are given blocks at a time; more get none, and compute."""

GIVE_S = 30.0  # longest that one is given blocks
LAST_GIVE_S = 5.0
CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class BlockServer:
    """Listens for other replicas. Must be closed.

    Args:
        model: what this replica serves; to one that asks for another model it gives nothing.
        block_bytes: size of a block, over all ranks.
    """

    def __init__(self, blocks: BlockExchange, model: str, block_bytes: int) -> None:
        self._blocks = blocks
        self._model = model
        piece_bytes = PIECE_BYTES_BETWEEN_STEPS if blocks.waits_for_steps else PIECE_BYTES
        self._num_at_once = max(1, piece_bytes // block_bytes)
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._open: set[asyncio.Task[None]] = set()  # connections
        self._giving: set[asyncio.Task[None]] = set()  # those that have asked

    async def start(self, host: str) -> tuple[str, int]:
        """Listen on a free port of ``host``; returns the address."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def close(self) -> None:
        """Stop listening, and let what is being given come to its end, up to ``LAST_GIVE_S``: requests that were here a
        moment ago go on elsewhere.
        """
        self._is_closed = True
        if self._server is not None:
            await stop_listening(self._server)
        for task in self._open - self._giving:
            task.cancel()
        if self._giving:
            await asyncio.wait(self._giving, timeout=LAST_GIVE_S)
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=CLOSE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # it was being accepted then
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        has_ended = False
        try:
            async with asyncio.timeout(GIVE_S):
                wanted = await receive(reader, BlocksWanted)
                self._giving.add(task)
                await self._give(wanted, writer)
            has_ended = True
        except (OSError, EOFError, ValueError, TimeoutError) as error:  # it is gone, or no replica
            logger.debug("blocks could not be given: %s", error)
        except ShoalError as error:  # no memory; or a rank has failed, and the replica is about to end
            logger.warning("blocks could not be given: %s", error)
        except asyncio.CancelledError:
            pass  # by ``close``; the server does not expect its tasks to be cancelled
        except Exception as error:  # others are to get theirs
            logger.error("blocks could not be given", extra=fields(**error_fields(error)))
        finally:
            self._open.discard(task)
            self._giving.discard(task)
            await _end(writer, has_ended)

    async def _give(self, wanted: BlocksWanted, writer: asyncio.StreamWriter) -> None:
        if wanted.model == self._model and len(self._giving) <= MAX_AT_ONCE and wanted.first >= 0:
            async with aclosing(self._blocks.give(wanted.block_hashes, wanted.first, self._num_at_once)) as pieces:
                async for num_blocks, parts in pieces:
                    await send_blocks(writer, num_blocks, parts)
        writer.write(frame(Coming()))
        await writer.drain()


async def _end(writer: asyncio.StreamWriter, has_ended: bool) -> None:
    """Close a connection; what is still to be sent is sent if all ``has_ended`` well."""
    if has_ended:
        writer.close()
    else:
        writer.transport.abort()
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
