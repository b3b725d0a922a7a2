"""Which kernels serve on a CPU: the native decoder's, or torch's operators. Imports no torch, for memory planning."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_kernels import native_library, native_limits
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import make_shard


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The native decoder's ``instruction_set``; or "" if torch serves, with the reason in ``why_torch``."""

    instruction_set: str
    why_torch: str = ""

    @property
    def is_native(self) -> bool:
        return bool(self.instruction_set)

    def __str__(self) -> str:
        return self.instruction_set or f"torch ({self.why_torch})"


def choose_kernels(model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig) -> CpuKernels:
    """The native kernels, if they were built with this installation and support the shards of all ranks (what ranks
    send each other must match).
    """
    supported = native_library.supported_kernels()
    if not supported:
        return CpuKernels("", "the native kernels were not built")
    if model.quantization != "none" and model.dtype != "bfloat16":
        return CpuKernels("", f"native {model.quantization} weights are for dtype bfloat16, not {model.dtype}")
    for rank in range(parallel.num_ranks):
        shard = make_shard(model, parallel, rank)
        reason = native_limits.refusal(
            dtype=model.dtype,
            hidden_size=model.hidden_size,
            intermediate_size=len(shard.mlp),
            num_heads=len(shard.heads),
            num_kv_heads=len(shard.kv_heads),
            head_size=model.head_size,
            block_size=cache.block_size,
            expert_size=model.moe.intermediate_size if model.moe else 0,
            shared_size=len(shard.shared_mlp),
        )
        if reason is not None:
            return CpuKernels("", f"for the native kernels {reason}")
    return CpuKernels(supported[0])
