"""The blocks of a prefix that is on its way to another replica, or from one."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.errors import Unavailable
from shoal_replica.kv_cache import BlockTable, KVCacheManager
from shoal_replica.prefix_cache import BlockHash

LEAST_LEFT = 8
"""Blocks on their way leave an eighth of the pool free: running sequences, which cannot wait, must not be preempted for
what may be computed as well.
"""


class GuestTable:
    """A table like that of a sequence, with a negative id: until ``close`` nobody evicts its blocks or gives them out.
    It begins with the prefix's leading blocks that are on the device.

    Attributes:
        num_filled: leading blocks that hold what they should.
    """

    def __init__(self, kv: KVCacheManager, block_hashes: Sequence[BlockHash]) -> None:
        self._kv = kv
        self._hashes = block_hashes
        self._id = next(kv.guest_ids)
        on_device = kv.prefix_cache.match(block_hashes)
        self.num_filled = len(on_device)
        kv.allocate(self._id, on_device, len(on_device) * kv.block_size)

    @property
    def num_wanted(self) -> int:
        """Blocks of the whole prefix."""
        return len(self._hashes)

    @property
    def block_ids(self) -> BlockTable:
        """The filled blocks and, after ``make_room``, the others."""
        return self._kv.block_table(self._id)

    def make_room(self) -> None:
        """Add blocks for the rest of the prefix. Raises Unavailable if there are too few free ones."""
        kv, start, end = self._kv, self.num_filled * self._kv.block_size, self.num_wanted * self._kv.block_size
        num_left = kv.pool.num_free - kv.num_blocks_to_append(self._id, start, end)
        # Moves that are in planned steps, and may still be dropped, must come before what is written here.
        if num_left < max(kv.num_tables, kv.pool.num_blocks // LEAST_LEFT) or kv.host.is_planned:
            raise Unavailable("there is no room for another replica's blocks")
        kv.append(self._id, start, end)

    def commit(self, num_blocks: int) -> None:
        """The next ``num_blocks`` blocks have got their contents: others may use them."""
        self.num_filled += num_blocks
        self._kv.commit(self._id, self._hashes, self.num_filled * self._kv.block_size)

    def close(self) -> None:
        self._kv.free(self._id)
