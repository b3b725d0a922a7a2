"""Moves KV blocks between an NPU and the host: few transfers for many blocks, overlapped with computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch_npu
from torch import Tensor

Move = tuple[int, int]


class BlockSwap:
    """Moves blocks of all ``caches`` to rows of pinned host memory and back, on its own stream.

    Both directions go through staging tensors on the device, so that neighbouring rows are one transfer wherever their
    blocks are, and the blocks may be overwritten at once. A call waits for the previous one on the device, never on the
    host.

    Args:
        caches: each [num_blocks, ...], contiguous; see ``ops.cache_shape``.
        num_rows: blocks that the host holds.
        num_at_once: blocks that the staging tensors hold; more are moved in several rounds.
    """

    def __init__(self, caches: Sequence[Tensor], num_rows: int, num_at_once: int) -> None:
        self._caches = caches
        self._host = [torch.empty(num_rows, *c.shape[1:], dtype=c.dtype, pin_memory=True) for c in caches]
        self._staging = [torch.empty(num_at_once, *c.shape[1:], dtype=c.dtype, device=c.device) for c in caches]
        self._num_at_once = num_at_once
        self._stream = torch_npu.npu.Stream()
        self._moved = torch_npu.npu.Event()

    def move_out(self, moves: Sequence[Move]) -> None:
        """Copy blocks to rows, as pairs of (block, row), after all work queued so far."""
        compute = torch_npu.npu.current_stream()
        for part in self._parts([(row, block) for block, row in moves]):
            ids, runs = self._ids(part), list(_runs(part))
            compute.wait_event(self._moved)  # the last transfer may still use the staging tensors
            for cache, staging in zip(self._caches, self._staging, strict=True):
                torch.index_select(cache, 0, ids, out=staging[: len(part)])
            self._stream.wait_stream(compute)
            with torch_npu.npu.stream(self._stream):
                for host, staging in zip(self._host, self._staging, strict=True):
                    for start, row, count in runs:
                        host[row : row + count].copy_(staging[start : start + count], non_blocking=True)
                self._moved.record()

    def move_in(self, moves: Sequence[Move]) -> None:
        """Copy rows to blocks, as pairs of (row, block), before any work queued later."""
        compute = torch_npu.npu.current_stream()
        for part in self._parts(moves):
            ids, runs = self._ids(part), list(_runs(part))
            self._stream.wait_stream(compute)  # it may still read the staging tensors
            with torch_npu.npu.stream(self._stream):
                for host, staging in zip(self._host, self._staging, strict=True):
                    for start, row, count in runs:
                        staging[start : start + count].copy_(host[row : row + count], non_blocking=True)
                self._moved.record()
            compute.wait_event(self._moved)
            for cache, staging in zip(self._caches, self._staging, strict=True):
                cache.index_copy_(0, ids, staging[: len(part)])

    def _parts(self, moves: Sequence[Move]) -> Iterator[list[Move]]:
        """The moves in the order of their rows, as many at a time as the staging tensors hold."""
        ordered = sorted(moves)
        for start in range(0, len(ordered), self._num_at_once):
            yield ordered[start : start + self._num_at_once]

    def _ids(self, part: Sequence[Move]) -> Tensor:
        return torch.tensor([block for _, block in part], dtype=torch.int64).to(self._caches[0].device)


def _runs(part: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive rows: (index of the first in ``part``, first row, number of rows)."""
    start = 0
    for end in range(1, len(part) + 1):
        if end == len(part) or part[end][0] != part[end - 1][0] + 1:
            yield start, part[start][0], end - start
            start = end
