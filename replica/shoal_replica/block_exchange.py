"""Cached blocks go from one replica to another, so that a prefix that one has computed need not be computed by all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import TypeVar

from shoal_replica.errors import Unavailable
from shoal_replica.executor import BlockPart, Executor, SchedulerOutput
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.stats import Totals
from shoal_replica.step_thread import StepThread

T = TypeVar("T")


class BlockExchange:
    """Reads an engine's cached blocks for others, and enters theirs. Its methods belong to the engine's event loop.

    Blocks under way have a table like that of a sequence (with a negative id), so nobody evicts or overwrites them.
    They are copied beside the steps or, where the executor cannot do that, between them.

    Args:
        on_taken: called when blocks have been entered into the prefix cache.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        executor: Executor,
        thread: StepThread,
        totals: Totals,
        on_taken: Callable[[], None],
    ) -> None:
        self._kv = kv
        self._executor = executor
        self._thread = thread
        self._totals = totals
        self._on_taken = on_taken
        self._ids = count(-1, -1)

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @property
    def waits_for_steps(self) -> bool:
        """Whether each copy waits for the end of a step, and the next step for the copy."""
        return not self._executor.copies_beside_steps

    def num_missing(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many blocks of a prefix to take over: those after the ones on the device. None if host memory has the
        next of them, as it is nearer.
        """
        num_cached = len(self._kv.prefix_cache.match(block_hashes))
        left = block_hashes[num_cached:]
        return 0 if left and left[0] in self._kv.host else len(left)

    async def give(
        self, block_hashes: Sequence[BlockHash], first: int, num_at_once: int
    ) -> AsyncGenerator[tuple[int, tuple[BlockPart, ...]], None]:
        """The contents of blocks ``[first:]`` of a prefix, as far as they are on the device without a gap: their number
        and the ranks' parts, ``num_at_once`` blocks at a time. They stay cached until the iterator is closed.

        Raises:
            EngineDead: a rank has failed.
        """
        with self._table(block_hashes) as (table_id, num_cached):
            for start in range(first, num_cached, num_at_once):
                block_ids = self._kv.block_table(table_id)[start : start + num_at_once]
                parts = await self._copy(partial(self._executor.read_blocks, block_ids))
                self._totals.num_blocks_given += len(block_ids)
                yield len(block_ids), parts

    @asynccontextmanager
    async def taking(self, block_hashes: Sequence[BlockHash]) -> AsyncIterator[Taking]:
        """Take over the blocks of a prefix that are not on the device yet. What has come by the end stays cached.

        Raises:
            Unavailable: there is no room for them.
            EngineDead: a rank has failed.
        """
        with self._table(block_hashes) as (table_id, num_cached):
            await self._make_room(table_id, num_cached, len(block_hashes))
            yield Taking(self, table_id, block_hashes, num_cached)

    async def take(
        self, table_id: int, block_hashes: Sequence[BlockHash], first: int, parts: Sequence[BlockPart]
    ) -> None:
        """See ``Taking.take``, which calls this for ``block_hashes[first:]``."""
        block_ids = self._kv.block_table(table_id)[first : len(block_hashes)]
        await self._copy(partial(self._executor.write_blocks, block_ids, parts))
        self._kv.commit(table_id, block_hashes, len(block_hashes) * self.block_size)
        self._totals.num_blocks_taken += len(block_ids)
        self._on_taken()

    async def _make_room(self, table_id: int, first: int, end: int) -> None:
        """Give a table blocks ``[first:end]``, and wait until they may be written."""
        kv, size = self._kv, self.block_size
        num_new = kv.num_blocks_to_append(table_id, first * size, end * size)
        if num_new + kv.num_tables > kv.pool.num_free or kv.host.is_planned:  # a block is left for each that may grow
            raise Unavailable("there is no room for another replica's blocks")
        kv.append(table_id, first * size, end * size)
        moves_out = kv.host.take_moves()[0]  # what the blocks have held
        step = SchedulerOutput(self._totals.num_steps, (), moves_out=moves_out)
        # Also without any it waits for the step that runs, which may still use blocks of an aborted sequence.
        await self._thread.run((lambda: self._executor.execute(step)) if moves_out else (lambda: None))

    async def _copy(self, work: Callable[[], T]) -> T:
        return await (self._thread.run(work) if self.waits_for_steps else self._thread.run_beside(work))

    @contextmanager
    def _table(self, block_hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """A table of the leading blocks that are on the device: its id, and their number."""
        table_id, on_device = next(self._ids), self._kv.prefix_cache.match(block_hashes)
        self._kv.allocate(table_id, on_device, len(on_device) * self.block_size)
        try:
            yield table_id, len(on_device)
        finally:
            self._kv.free(table_id)


class Taking:
    """The blocks of one prefix, as they come.

    Attributes:
        num_blocks: leading blocks that are here by now.
    """

    def __init__(
        self, exchange: BlockExchange, table_id: int, block_hashes: Sequence[BlockHash], num_blocks: int
    ) -> None:
        self._exchange = exchange
        self._table_id = table_id
        self._block_hashes = block_hashes
        self.num_blocks = num_blocks

    async def take(self, num_blocks: int, parts: Sequence[BlockPart]) -> None:
        """Enter the next ``num_blocks`` blocks, of which ``parts`` are the contents.

        Raises:
            Unavailable: so many are not missing.
            ConfigError: they are of another kind than the blocks here.
            EngineDead: a rank has failed.
        """
        first, end = self.num_blocks, self.num_blocks + num_blocks
        if not 0 < num_blocks <= len(self._block_hashes) - first:
            raise Unavailable(f"got {num_blocks} blocks; {len(self._block_hashes) - first} are missing")
        await self._exchange.take(self._table_id, self._block_hashes[:end], first, parts)
        self.num_blocks = end
