"""KV blocks between an NPU and the host: one transfer for any number of blocks, beside the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor


class BlockSwap:
    """Moves blocks of one cache to rows of pinned host memory and back, on a stream of its own.

    Both directions go through one staging tensor, so a call waits on the device, never on the host, for the one before.

    Args:
        cache: [num_blocks, ...], contiguous; see ``ops.cache_shape``.
        num_rows: blocks that the host holds.
        num_at_once: the most that one call moves.
    """

    def __init__(self, cache: Tensor, num_rows: int, num_at_once: int) -> None:
        self._cache = cache
        self._host = torch.empty(num_rows, *cache.shape[1:], dtype=cache.dtype, pin_memory=True)
        self._staging = torch.empty(num_at_once, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        self._stream = torch_npu.npu.Stream()
        self._moved = torch_npu.npu.Event()

    @property
    def rows(self) -> Tensor:
        """The host's blocks [num_rows, ...]; what a swap out wrote is there once its event has been waited for."""
        return self._host

    def swap_out(self, block_ids: Sequence[int], first_row: int) -> torch_npu.npu.Event:
        """Copy blocks to rows ``first_row`` and on, after all work queued so far. They may be overwritten at once."""
        count, compute = len(block_ids), torch_npu.npu.current_stream()
        compute.wait_event(self._moved)
        torch.index_select(self._cache, 0, self._ids(block_ids), out=self._staging[:count])
        self._stream.wait_stream(compute)
        with torch_npu.npu.stream(self._stream):
            self._host[first_row : first_row + count].copy_(self._staging[:count], non_blocking=True)
            self._moved.record()
        return self._moved

    def swap_in(self, first_row: int, block_ids: Sequence[int]) -> None:
        """Copy rows ``first_row`` and on to blocks; work queued later finds them there."""
        count, compute = len(block_ids), torch_npu.npu.current_stream()
        ids = self._ids(block_ids)
        self._stream.wait_stream(compute)  # the staging tensor's last reader may be there
        with torch_npu.npu.stream(self._stream):
            self._staging[:count].copy_(self._host[first_row : first_row + count], non_blocking=True)
            self._moved.record()
        compute.wait_event(self._moved)
        self._cache.index_copy_(0, ids, self._staging[:count])

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self._cache.device)
