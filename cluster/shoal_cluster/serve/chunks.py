"""Streams of chunks: opened so that they are always closed, and several merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import cast

from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.request_id import another_id
from shoal_replica.errors import InvalidArgument


def open_chunks(core: GatewayCore, call: GenerateCall) -> AbstractAsyncContextManager[AsyncGenerator[Chunk, None]]:
    """The stream of ``call``. It is closed at the end of the context, which cancels what still runs."""
    return aclosing(cast("AsyncGenerator[Chunk, None]", core.generate(call)))


async def _under_any_id(core: GatewayCore, call: GenerateCall) -> AsyncGenerator[Chunk, None]:
    """The stream of ``call``. It runs under another id, which only logs tell, if its own turns out to be taken, as by a
    call of another gateway. It then counts as two calls, the first one invalid.
    """
    async with open_chunks(core, call) as chunks:
        try:
            first = await anext(chunks, None)
        except InvalidArgument as error:
            if error.field != "request_id":
                raise
            async with open_chunks(core, replace(call, request_id=another_id(call.request_id))) as again:
                async for chunk in again:
                    yield chunk
            return
        if first is not None:
            yield first
        async for chunk in chunks:
            yield chunk


@asynccontextmanager
async def open_merged_chunks(
    core: GatewayCore, calls: Sequence[GenerateCall]
) -> AsyncIterator[AsyncIterator[tuple[int, Chunk]]]:
    """The streams of ``calls``, run together: (number of the call, chunk) as they come. All are closed at the end.

    A call whose id is taken runs under another. The first error of any is raised to the reader. A slow reader holds
    the streams back.
    """
    if len(calls) == 1:  # the usual case needs no queue
        async with aclosing(_under_any_id(core, calls[0])) as chunks:
            yield ((0, chunk) async for chunk in chunks)
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(maxsize=len(calls))

    async def pump(number: int, call: GenerateCall) -> None:
        try:
            async with aclosing(_under_any_id(core, call)) as chunks:
                async for chunk in chunks:
                    await queue.put((number, chunk))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def read() -> AsyncIterator[tuple[int, Chunk]]:
        num_open = len(calls)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item

    pumps = [asyncio.create_task(pump(number, call)) for number, call in enumerate(calls)]
    try:
        yield read()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
