"""Cached blocks go from one replica to another, so that a prefix that one has computed need not be computed by all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

from shoal_replica.errors import ConfigError
from shoal_replica.executor import BlockPart, Executor, SchedulerOutput
from shoal_replica.guest_table import GuestTable
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.stats import Totals
from shoal_replica.step_thread import StepThread

T = TypeVar("T")


class BlockExchange:
    """Reads an engine's cached blocks for others, and enters theirs. Its methods belong to the engine's event loop.

    Blocks under way have a ``GuestTable``. They are copied beside the steps or, where the executor cannot do that,
    between them.

    Args:
        on_change: called when blocks have been given, or have been taken and entered into the prefix cache.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        executor: Executor,
        thread: StepThread,
        totals: Totals,
        on_change: Callable[[], None],
    ) -> None:
        self._kv = kv
        self._executor = executor
        self._thread = thread
        self._totals = totals
        self._on_change = on_change

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @property
    def waits_for_steps(self) -> bool:
        """Whether each copy waits for the end of a step, and the next step for the copy."""
        return not self._executor.copies_beside_steps

    def num_missing(self, block_hashes: Sequence[BlockHash]) -> int:
        """See ``KVCacheManager.num_missing``."""
        return self._kv.num_missing(block_hashes)

    async def give(
        self, block_hashes: Sequence[BlockHash], first: int, num_at_once: int
    ) -> AsyncGenerator[tuple[int, tuple[BlockPart, ...]], None]:
        """The contents of blocks ``[first:]`` of a prefix, as far as they are on the device without a gap: their number
        and the ranks' parts, ``num_at_once`` blocks at a time. They stay cached until the iterator is closed.

        Raises:
            EngineDead: a rank has failed.
        """
        try:
            with closing(GuestTable(self._kv, block_hashes)) as table:
                if self._kv.host.num_rows:  # what comes back from host memory counts as cached before it is there
                    await self._thread.run(lambda: None)
                for start in range(first, table.num_filled, num_at_once):
                    block_ids = table.block_ids[start : start + num_at_once]
                    parts = await self._copy(partial(self._executor.read_blocks, block_ids))
                    self._totals.num_blocks_given += len(block_ids)
                    yield len(block_ids), parts
        finally:
            self._on_change()

    @contextmanager
    def taking(self, block_hashes: Sequence[BlockHash]) -> Iterator[Taking]:
        """Take over the blocks of a prefix that are not on the device yet. What has come by the end stays cached."""
        with closing(GuestTable(self._kv, block_hashes)) as table:
            yield Taking(self, table)

    async def fill(self, table: GuestTable, num_blocks: int, parts: Sequence[BlockPart]) -> None:
        """See ``Taking.take``, which calls this."""
        if len(table.block_ids) == table.num_filled:
            await self._make_room(table)
        block_ids = table.block_ids[table.num_filled : table.num_filled + num_blocks]
        await self._copy(partial(self._executor.write_blocks, block_ids, parts))
        table.commit(num_blocks)
        self._totals.num_blocks_taken += num_blocks
        self._on_change()

    async def _make_room(self, table: GuestTable) -> None:
        """Add the missing blocks, and wait until they may be written: until the step that runs has ended, which may
        still use blocks of an aborted sequence, and what they have held is in host memory.
        """
        table.make_room()
        coming, moves_out = self._kv.host.coming(), self._kv.host.take_moves()[0]
        step, has_failed = SchedulerOutput(self._totals.num_steps, (), moves_out=moves_out), False

        def move_out() -> None:
            nonlocal has_failed
            has_failed = True
            self._executor.execute(step)
            has_failed = False

        try:
            await self._thread.run(move_out if moves_out else (lambda: None))
        finally:  # even if cancelled: it has ended by then
            if has_failed:
                self._kv.host.forget(coming)

    async def _copy(self, work: Callable[[], T]) -> T:
        return await (self._thread.run(work) if self.waits_for_steps else self._thread.run_beside(work))


class Taking:
    """The blocks of one prefix, as they come."""

    def __init__(self, exchange: BlockExchange, table: GuestTable) -> None:
        self._exchange = exchange
        self._table = table

    @property
    def num_blocks(self) -> int:
        """Leading blocks that are here by now."""
        return self._table.num_filled

    async def take(self, num_blocks: int, parts: Sequence[BlockPart]) -> None:
        """Enter the next ``num_blocks`` blocks, of which ``parts`` are the contents.

        Raises:
            Unavailable: there is no room for them.
            ConfigError: so many are not missing, or they are of another kind than the blocks here.
            EngineDead: a rank has failed.
        """
        num_missing = self._table.num_wanted - self._table.num_filled
        if not 0 < num_blocks <= num_missing:
            raise ConfigError(f"blocks: got {num_blocks}; {num_missing} are missing")
        await self._exchange.fill(self._table, num_blocks, parts)
