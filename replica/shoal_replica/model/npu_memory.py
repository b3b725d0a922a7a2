"""Whether a rank fits an NPU: its operators must support the shape, and its memory must suffice."""

from __future__ import annotations

import logging
import sys

import torch

from shoal_kernels import npu_limits
from shoal_replica.config import CacheConfig, EngineConfig
from shoal_replica.errors import ConfigError
from shoal_replica.memory import available_bytes
from shoal_replica.memory_advice import npu_changes
from shoal_replica.memory_plan import plan_memory
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, make_shard

QUANTIZATIONS = ("none", "int8", "w8a8")  # the last two are one: the cube unit multiplies bytes with bytes
EXTRA_BLOCKS = 1  # beside the pool, for the padding of graphs

logger = logging.getLogger(__name__)


def open_device() -> torch.device:
    """Select the NPU of this process: the first that it sees, which whatever starts the process has chosen.

    Raises:
        ConfigError: torch_npu cannot be imported, or no NPU is visible.
    """
    try:
        import torch_npu
    except ImportError as error:
        raise ConfigError(f"device: 'npu' needs torch_npu (the extra shoal[npu]) and CANN: {error}") from error
    if torch_npu.npu.device_count() == 0:
        raise ConfigError("device: no NPU is visible to this process; see npu-smi info and ASCEND_RT_VISIBLE_DEVICES")
    torch_npu.npu.set_device(0)
    return torch.device("npu:0")


def free_bytes() -> int:
    """Free memory of the device that this process sees. Raises ConfigError, see ``open_device``."""
    open_device()
    from shoal_kernels.npu_graph import memory_info

    return memory_info()[0]


def max_num_blocks(model: ModelConfig, shard: Shard) -> int:
    """How many KV blocks the attention operator can address on a rank."""
    return npu_limits.max_num_blocks(len(shard.kv_heads), model.head_size)


def check_shape(model: ModelConfig, cache: CacheConfig, shard: Shard) -> None:
    """Raise ConfigError if the operators do not support what a rank would need. Opens no device."""
    if model.quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization: got {model.quantization!r}; an NPU takes {', '.join(QUANTIZATIONS)}")
    if model.has_offset_norms:
        raise ConfigError(
            f"model: {model.architecture}: norms whose weights are stored less one are not served on an NPU"
        )
    refusal = npu_limits.refusal(
        npu_limits.AttentionShape(
            dtype=getattr(torch, model.dtype),
            num_heads=len(shard.heads),
            num_kv_heads=len(shard.kv_heads),
            head_size=model.head_size,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks + EXTRA_BLOCKS,
            sliding_window=model.sliding_window,
        )
    )
    if refusal is not None:
        raise ConfigError(refusal)


def check_memory(config: EngineConfig, rank: int) -> None:
    """Log what this rank's memory will be used for; raise ConfigError if it does not fit. Call it before loading."""
    free = min(free_bytes(), config.parallel.device_memory_bytes or sys.maxsize)
    shard = make_shard(config.model, config.parallel, rank)
    settings, rest = (config.model, config.scheduler, config.parallel), (config.cache, free, config.adapter_bytes)
    plan = plan_memory(*settings, shard, *rest)
    logger.info("rank %d: %s", rank, plan.report())
    plan.check(npu_changes(*settings, shard.stage, *rest))
    room = available_bytes() // plan.block
    if config.cache.num_host_blocks > room:
        raise ConfigError(
            f"num_host_blocks: got {config.cache.num_host_blocks}; rank {rank}: {plan.report()}, "
            f"which has room for {room}"
        )
