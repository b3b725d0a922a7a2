"""Takes over another replica's cached blocks for a request, where that is faster than to compute them."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal_cluster.policies.transfer_pace import TransferPace, usable_blocks
from shoal_cluster.serve.block_wire import READ_BYTES, BlocksWanted, receive_blocks
from shoal_cluster.serve.feed_messages import BlockSource
from shoal_cluster.serve.logs import error_fields, fields
from shoal_replica.engine import Engine
from shoal_replica.errors import EngineDead, ShoalError, Unavailable
from shoal_replica.frames import frame
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request

ASSUMED_BYTES_PER_S = 2**29
"""How fast blocks come before any have: a slow network's pace. What is measured takes its place."""

LEAST_S = 0.25
"""From its turn on, a fetch may take as long as computing the blocks would, or so long if that is longer."""

MOST_S = 10.0  # in any case, with the wait for its turn
UNKNOWN_S = 2.0  # the same while nothing is known of how long that takes
MAX_AT_ONCE = 8
MAX_BEGUN = 64  # the same for requests that another replica has begun
RETRY_S = 10.0  # after a failure, nothing is asked of that replica for so long
CLOSE_S = 5.0

logger = logging.getLogger(__name__)

Address = tuple[str, int]
Hashes = tuple[BlockHash, ...]


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
        self._turn = asyncio.Lock()  # one fetch after the other: together all would be late
        self._num_blocks = 0  # of all fetches to come
        self._failed: dict[Address, float] = {}  # when the last fetch from there failed

    def num_coming(self, request: Request, source: BlockSource | None) -> int:
        """Leading blocks of ``request`` that will be here if it waits for what ``source`` has; 0: it is not to wait."""
        has_begun = bool(request.output_token_ids)  # elsewhere: to compute it would also delay what runs here
        if source is None or len(self._tasks) >= (MAX_BEGUN if has_begun else MAX_AT_ONCE):
            return 0
        now, wanted = time.monotonic(), self._wanted(request, source)
        self._failed = {address: at for address, at in self._failed.items() if now - at < RETRY_S}
        num_missing = self._engine.blocks.num_missing(wanted)
        if not num_missing or (source.host, source.port) in self._failed:
            return 0
        is_worth = self._pace.is_worth(
            num_missing, self._num_blocks, has_begun=has_begun, block_compute_s=self._block_compute_s(), now=now
        )
        return len(wanted) if is_worth else 0

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
        wanted = self._wanted(request, source)
        num_blocks, block_s = self._engine.blocks.num_missing(wanted), self._block_compute_s()
        limit_s = UNKNOWN_S if block_s is None else max(LEAST_S, num_blocks * block_s)
        self._num_blocks += num_blocks
        began_s, has_time = time.monotonic(), False
        try:
            async with asyncio.timeout(MOST_S), self._turn:
                has_time = time.monotonic() - began_s < MOST_S / 2  # else the turns before it are to blame, no source
                async with asyncio.timeout(limit_s):
                    await self._take(wanted, source)
        except Unavailable as error:
            logger.debug("request %s: blocks could not be taken over: %s", request.request_id, error)
        except EngineDead:
            pass  # which all requests are told
        except (OSError, EOFError, ValueError, TimeoutError, ShoalError) as error:
            told = str(error) or type(error).__name__
            logger.info("request %s: blocks could not be fetched: %s", request.request_id, told)
            if has_time:
                self._failed[source.host, source.port] = time.monotonic()
        except Exception as error:
            where = fields(request_id=request.request_id, **error_fields(error))
            logger.error("blocks could not be fetched", extra=where)
        finally:
            self._num_blocks -= num_blocks
            self._engine.release(request.request_id)

    async def _take(self, wanted: Hashes, source: BlockSource) -> None:
        """Fetch what is missing, which another request may have fetched meanwhile."""
        with self._engine.blocks.taking(wanted) as taking:
            if (first := taking.num_blocks) == len(wanted):
                return
            reader, writer = await asyncio.open_connection(source.host, source.port, limit=READ_BYTES)
            try:
                began_s = time.monotonic()
                writer.write(frame(BlocksWanted(self._model, wanted, first)))
                while (piece := await receive_blocks(reader))[0]:
                    await taking.take(*piece)
                if num_blocks := taking.num_blocks - first:
                    now = time.monotonic()
                    self._pace.take(num_blocks, now - began_s, now)
            finally:
                writer.transport.abort()

    def _wanted(self, request: Request, source: BlockSource) -> Hashes:
        return usable_blocks(request, source.num_blocks, self._engine.blocks.block_size)

    def _block_compute_s(self) -> float | None:
        """Seconds to compute a block; None if no prompt has been measured yet."""
        stats = self._engine.stats()
        return stats.block_size * stats.token_s if stats.token_s else None
