"""Measures the machine's floor in a worker process, between the engines' turns.

``{"op": "floor", "read_bytes": n}`` takes one sample; n is the number of bytes read in one pass: the weights' size.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_replica.bench.worker import Engine, Settings, serve

GEMM_SIZES = ((256, 576, 1536), (1024, 576, 3072), (2048, 2048, 2048))
GEMM_DTYPES = (torch.bfloat16, torch.float32)  # without bf16 instructions, bf16 is ten times slower
MIN_SAMPLE_S = 0.15
ROW = 1024  # values per row of the matrix that is read
ROW_BYTES = 4 * ROW


class FloorMeter(Engine):
    """Reads memory in huge pages with the fastest of three readers, and multiplies matrices of model sizes in the
    faster dtype.

    The readers are a sum (one stream per thread), the dot product of one half with the other (two streams), and a
    matrix-vector product (several).
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self._data = torch.empty(0)
        with torch.inference_mode():
            fastest = max(GEMM_DTYPES, key=lambda dtype: _flops(*_matrices(*GEMM_SIZES[-1], dtype)))
        self._pairs = [_matrices(*sizes, fastest) for sizes in GEMM_SIZES]
        self.versions, self.info = {"torch": torch.__version__}, {"gemm_dtype": str(fastest).removeprefix("torch.")}

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        return [[] for _ in prompts]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] != "floor":
            return super().answer(request)
        with torch.inference_mode():
            read = self._read(int(request["read_bytes"]))
            flops = max(_flops(x, weight) for x, weight in self._pairs)
        return {"read_bytes_s": read, "gemm_flops_s": flops}

    def _read(self, num_bytes: int) -> float:
        """Bytes read per second, over whole pairs of rows."""
        num_pairs = max(1, num_bytes // (2 * ROW_BYTES))
        if self._data.numel() != 2 * num_pairs * ROW:
            self._data = _huge_pages(2 * num_pairs * ROW_BYTES)
        halves, rows = self._data.view(2, -1), self._data.view(-1, ROW)
        readers = (self._data.sum, partial(torch.dot, *halves), partial(torch.mv, rows, torch.ones(ROW)))
        return self._data.nbytes / min(_seconds(reader) for reader in readers)


def _matrices(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An input of shape [m, k] and a weight of shape [n, k]."""
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)


def _flops(x: Tensor, weight: Tensor) -> float:
    """Floating-point operations per second of x times the transposed weight."""
    return 2 * x.numel() * weight.shape[0] / _seconds(partial(functional.linear, x, weight))


def _huge_pages(num_bytes: int) -> Tensor:
    """Float32 ones in huge pages where the system has them: small pages cost a third of the bandwidth. The mapping is
    private, because shared memory gets small pages by default.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def _seconds(work: Callable[[], object]) -> float:
    """Mean seconds per call over ``MIN_SAMPLE_S``: a sustained rate, as the engines need it."""
    work()
    num_calls, started = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - started) < MIN_SAMPLE_S:
        work()
        num_calls += 1
    return passed_s / num_calls


if __name__ == "__main__":
    serve(FloorMeter, Settings(**json.loads(sys.argv[1])))
