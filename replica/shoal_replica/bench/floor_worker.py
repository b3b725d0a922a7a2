"""Measures the floor in a worker process, between the engines.

``{"op": "floor", "read_bytes": n}`` gives one sample; n: how much is read at a time, as many bytes as the weights have.
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
MIN_SAMPLE_S = 0.15
PAIR_BYTES = 8  # two float32


class FloorMeter(Engine):
    """Reads memory in huge pages by the faster of two readers, and multiplies bf16 matrices of model sizes.

    The readers are a sum, one stream a thread, and the dot product of one half with the other, two streams.
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self.versions, self.info = {"torch": torch.__version__}, {}
        self._data = torch.empty(0)
        self._matrices = [(torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()) for m, k, n in GEMM_SIZES]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [[] for _ in prompts]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] != "floor":
            return super().answer(request)
        with torch.inference_mode():
            read = self._read(int(request["read_bytes"]))
            flops = [
                2 * x.numel() * weight.shape[0] / _seconds(partial(functional.linear, x, weight))
                for x, weight in self._matrices
            ]
        return {"read_bytes_s": read, "gemm_flops_s": max(flops)}

    def _read(self, num_bytes: int) -> float:
        """Bytes per second."""
        if self._data.nbytes != num_bytes // PAIR_BYTES * PAIR_BYTES:
            self._data = _huge_pages(num_bytes // PAIR_BYTES * PAIR_BYTES)
        halves = self._data.view(2, -1)
        return self._data.nbytes / min(_seconds(self._data.sum), _seconds(partial(torch.dot, *halves)))


def _huge_pages(num_bytes: int) -> Tensor:
    """Float32 ones in pages as large as the system gives: small ones cost a third of the bandwidth. Private memory, for
    what can be shared gets small pages by default.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of a call, the mean of those in ``MIN_SAMPLE_S``: what can be kept up, as the engines must."""
    work()
    num_calls, started = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - started) < MIN_SAMPLE_S:
        work()
        num_calls += 1
    return passed_s / num_calls


if __name__ == "__main__":
    serve(FloorMeter, Settings(**json.loads(sys.argv[1])))
