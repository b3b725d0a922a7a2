"""Takes over another replica's cached blocks for a request, where that is faster than to compute them."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal_cluster.policies.transfer_pace import TransferPace
from shoal_cluster.serve.block_wire import Wanted, receive_blocks
from shoal_cluster.serve.feed_messages import BlockSource, frame
from shoal_replica.engine import Engine
from shoal_replica.errors import EngineDead, ShoalError
from shoal_replica.request import Request

ASSUMED_BYTES_PER_S = 2**29
"""How fast blocks come before any have: a slow network's pace. What is measured takes its place."""

LEAST_S = 0.25
"""A fetch is given up when computing the blocks would be done by now, but not before this."""

UNKNOWN_S = 2.0  # the same while nothing is known of how long that takes
MAX_AT_ONCE = 8
RETRY_S = 10.0  # after a failure, nothing is asked of that replica for so long
CLOSE_S = 5.0

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class BlockFetcher:
    """Holds a request at the engine while its blocks come, never for much longer than it would take to compute them.

    Args:
        model: what this replica serves; others give blocks of the same only.
        block_bytes: size of a block, over all ranks.
    """

    def __init__(self, engine: Engine, model: str, block_bytes: int) -> None:
        self._engine = engine
        self._model = model
        self._pace = TransferPace(block_bytes / ASSUMED_BYTES_PER_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: dict[Address, float] = {}  # when the last fetch from there failed

    def is_worth(self, request: Request, source: BlockSource | None) -> bool:
        """Whether ``request`` is to wait for the blocks that ``source`` has."""
        if source is None or not request.block_hashes or len(self._tasks) >= MAX_AT_ONCE:
            return False
        if time.monotonic() - self._failed.get((source.host, source.port), -RETRY_S) < RETRY_S:
            return False
        num_blocks = self._num_missing(request, source)
        return self._pace.is_worth(num_blocks, self._compute_s(num_blocks))

    def fetch(self, request: Request, source: BlockSource, finished: asyncio.Future[None]) -> None:
        """Begin to fetch the blocks of a held request, and release it once they are here, or will not come.
        ``finished`` ends the fetch: the request is over.
        """
        task = asyncio.get_running_loop().create_task(self._fetch(request, source), name="shoal-block-fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        finished.add_done_callback(lambda _: task.cancel())

    async def close(self) -> None:
        """End what is under way. Requests that are held stay so: the engine is about to stop."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _fetch(self, request: Request, source: BlockSource) -> None:
        compute_s, began_s = self._compute_s(self._num_missing(request, source)), time.monotonic()
        try:
            async with asyncio.timeout(UNKNOWN_S if compute_s is None else max(LEAST_S, compute_s)):
                num_blocks = await self._take(request, source)
        except (OSError, EOFError, ValueError, TimeoutError, ShoalError) as error:
            if not isinstance(error, EngineDead):
                told = str(error) or type(error).__name__
                logger.info("request %s: blocks could not be fetched: %s", request.request_id, told)
            self._failed[source.host, source.port] = time.monotonic()
        else:
            if num_blocks:
                self._pace.take(num_blocks, time.monotonic() - began_s)
        self._engine.release(request.request_id)

    async def _take(self, request: Request, source: BlockSource) -> int:
        """Fetch what is missing. Returns how many blocks have come."""
        hashes = request.block_hashes[: self._num_usable(request, source)]
        reader, writer = await asyncio.open_connection(source.host, source.port)
        try:
            async with self._engine.blocks.taking(hashes) as taking:
                first = taking.num_blocks
                writer.write(frame(Wanted(self._model, hashes, first)))
                while (piece := await receive_blocks(reader))[0]:
                    await taking.take(*piece)
                return taking.num_blocks - first
        finally:
            writer.transport.abort()

    def _num_usable(self, request: Request, source: BlockSource) -> int:
        """Leading blocks that the source has and the request can use: its last token is always computed."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return min(source.num_blocks, (num_tokens - 1) // self._engine.blocks.block_size, len(request.block_hashes))

    def _num_missing(self, request: Request, source: BlockSource) -> int:
        return self._engine.blocks.num_missing(request.block_hashes[: self._num_usable(request, source)])

    def _compute_s(self, num_blocks: int) -> float | None:
        """Seconds to compute so many blocks; None if no prompt has been measured yet."""
        stats = self._engine.stats()
        return num_blocks * stats.block_size * stats.token_s if stats.token_s else None
