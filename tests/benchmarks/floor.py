"""What the machine allows, measured in the same run as the engine: memory bandwidth and bf16 matrix throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from shoal_replica.config import ModelConfig

READ_BYTES = 512 << 20
GEMM_SIZES = ((256, 576, 1536), (1024, 576, 3072), (2048, 2048, 2048))
MIN_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes and floating-point operations per second of ``num_threads`` cores."""

    num_threads: int
    read_bytes_s: float
    gemm_flops_s: float

    def decode_s(self, model: ModelConfig, num_seqs: int, context: int) -> float:
        """A step of one token each: weights once and KV once, or the operations, whichever takes longer."""
        read = model.weight_bytes + num_seqs * context * model.block_bytes(1)
        return max(read / self.read_bytes_s, num_seqs * _token_flops(model, context, head=True) / self.gemm_flops_s)

    def prefill_s(self, model: ModelConfig, num_tokens: int, cached: int = 0) -> float:
        """Tokens ``[cached, num_tokens)`` of a prompt, and the logits of its last."""
        flops = sum(_token_flops(model, position, head=False) for position in range(cached, num_tokens))
        return (flops + 2 * model.vocab_size * model.hidden_size) / self.gemm_flops_s


def measure_floor(num_threads: int, repeats: int = 5) -> Floor:
    """The best of ``repeats``: a floor is what could be, not what a busy machine gave."""
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        data = torch.ones(READ_BYTES // 4)
        read = READ_BYTES / min(_times(data.sum, repeats))
        flops = 0.0
        for m, k, n in GEMM_SIZES:
            x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
            seconds = min(_times(lambda x=x, weight=weight: functional.linear(x, weight), repeats))
            flops = max(flops, 2 * m * k * n / seconds)
    return Floor(num_threads, read, flops)


def _token_flops(model: ModelConfig, context: int, *, head: bool) -> int:
    """Multiplications and additions of one token that attends to ``context`` others."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    linears = 2 * (model.num_parameters - embeddings)
    attention = 4 * model.num_layers * model.num_heads * model.head_size * context
    return linears + attention + (2 * model.vocab_size * model.hidden_size if head else 0)


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    seconds = []
    for _ in range(repeats):
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < MIN_SAMPLE_S:
            work()
            calls += 1
        seconds.append((time.perf_counter() - start) / calls)
    return seconds
