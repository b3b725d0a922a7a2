"""A replica's block pool as a picture: one cell per block, or per few blocks where there are very many."""

from __future__ import annotations

import msgspec

MAX_CELLS = 4096


class BlockMap(msgspec.Struct, frozen=True, kw_only=True):
    """``cells`` are in the order of block ids, each as hot as the hottest of its ``blocks_per_cell`` blocks.

    A cell is 0 if empty; 1 to 127 if it caches a prefix, the higher the later it will be evicted; 128 plus the number
    of references if allocated (``BlockPool.heat``).
    """

    num_blocks: int
    blocks_per_cell: int
    cells: bytes


def block_map(heat: bytes, max_cells: int = MAX_CELLS) -> BlockMap:
    """The map of a pool, from one byte of ``heat`` per block, in at most ``max_cells`` cells."""
    per_cell = max(1, -(-len(heat) // max_cells))
    cells = heat if per_cell == 1 else bytes(max(heat[i : i + per_cell]) for i in range(0, len(heat), per_cell))
    return BlockMap(num_blocks=len(heat), blocks_per_cell=per_cell, cells=cells)


def encode_block_map(heat: bytes) -> bytes:
    """A replica's answer when it is asked for its blocks."""
    return msgspec.msgpack.encode(block_map(heat))


def decode_block_map(body: bytes) -> BlockMap:
    """Decode what ``encode_block_map`` made. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=BlockMap)
