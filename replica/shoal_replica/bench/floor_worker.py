"""Measures the floor in a worker process, between the engines: ``{"op": "floor"}`` gives one sample."""

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

READ_BYTES = 512 << 20
GEMM_SIZES = ((256, 576, 1536), (1024, 576, 3072), (2048, 2048, 2048))
MIN_SAMPLE_S = 0.1


class FloorMeter(Engine):
    """Reads a gigabyte's half in huge pages, as fast as torch sums it, and multiplies bf16 matrices of model sizes."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self.versions, self.info = {"torch": torch.__version__}, {}
        self._data = _huge_pages(READ_BYTES)
        self._matrices = [(torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()) for m, k, n in GEMM_SIZES]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [[] for _ in prompts]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] != "floor":
            return super().answer(request)
        with torch.inference_mode():
            read = READ_BYTES / _seconds(self._data.sum)
            flops = [
                2 * x.numel() * weight.shape[0] / _seconds(partial(functional.linear, x, weight))
                for x, weight in self._matrices
            ]
        return {"read_bytes_s": read, "gemm_flops_s": max(flops)}


def _huge_pages(num_bytes: int) -> Tensor:
    """Float32 ones in pages as large as the system gives: small ones cost a third of the bandwidth."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of a call, the shortest of those in ``MIN_SAMPLE_S``."""
    work()
    best, end = float("inf"), time.perf_counter() + MIN_SAMPLE_S
    while (started := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    serve(FloorMeter, Settings(**json.loads(sys.argv[1])))
