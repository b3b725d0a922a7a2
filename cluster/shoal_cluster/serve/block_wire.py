"""What replicas say to each other when one takes over another's cached blocks: a connection for each prefix.

The one that wants blocks sends ``BlocksWanted``. The other answers with ``Coming`` for some blocks at a time, followed
by their contents, one rank's after the other's; the last one is of no block. Frames are msgpack behind a four-byte
length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shoal_replica.executor import BlockPart
from shoal_replica.frames import LENGTH_BYTES, body_bytes, frame
from shoal_replica.prefix_cache import BlockHash

PIECE_BYTES = 2 * 2**20
"""Blocks are sent so many bytes at a time, or one by one if a block is larger: what one replica copies while the other
copies what came before.
"""

PIECE_BYTES_BETWEEN_STEPS = 32 * 2**20
"""The same where each piece waits for the end of a step, and the next step for the piece."""

MAX_FRAME_BYTES = 64 * 2**20  # hashes of four million blocks
MAX_PIECE_BYTES = 2**27  # what a rank takes in one message is limited, too

READ_BYTES = 2**22
"""Of a connection, so many bytes are read ahead."""

Message = TypeVar("Message", bound=msgspec.Struct)


class BlocksWanted(msgspec.Struct, frozen=True):
    """``block_hashes[first:]`` are wanted, for the ``model`` that the asker serves."""

    model: str
    block_hashes: tuple[BlockHash, ...]
    first: int


class Coming(msgspec.Struct, frozen=True):
    """The next ``num_blocks`` blocks follow: of each rank so many bytes in that layout. None: there are no more."""

    num_blocks: int = 0
    layouts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


async def send_blocks(writer: asyncio.StreamWriter, num_blocks: int, parts: Sequence[BlockPart]) -> None:
    """Send some blocks, at the pace at which they are read."""
    layouts, sizes = tuple(part.layout for part in parts), tuple(part.contents.nbytes for part in parts)
    writer.write(frame(Coming(num_blocks, layouts, sizes)))
    for part in parts:
        writer.write(part.contents)
    await writer.drain()


async def receive_blocks(reader: asyncio.StreamReader) -> tuple[int, tuple[BlockPart, ...]]:
    """The next blocks and their contents; 0 if there are no more. Raises as ``receive`` does."""
    coming = await receive(reader, Coming)
    if len(coming.layouts) != len(coming.sizes) or not 0 <= sum(coming.sizes) <= MAX_PIECE_BYTES:
        raise ConnectionError(f"a piece of {coming.sizes} bytes is over {MAX_PIECE_BYTES}, or not of {coming.layouts}")
    contents = [memoryview(await reader.readexactly(size)) for size in coming.sizes]
    return coming.num_blocks, tuple(map(BlockPart, coming.layouts, contents))


async def receive(reader: asyncio.StreamReader, kind: type[Message]) -> Message:
    """A message. Raises EOFError or OSError if the other is gone, ConnectionError or ValueError if it is no such
    message.
    """
    size = body_bytes(await reader.readexactly(LENGTH_BYTES), MAX_FRAME_BYTES)
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
