"""From plain settings to a configuration that fits this host, and from that to an engine's parts."""

from __future__ import annotations

import gc

from shoal_replica.checkpoint import ensure_checkpoint
from shoal_replica.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    check_memory,
)
from shoal_replica.executor import Executor
from shoal_replica.memory import available_bytes, default_num_blocks
from shoal_replica.ranks.executor import RankExecutor
from shoal_replica.ranks.launcher import LocalRanks, RankLauncher
from shoal_replica.scheduler import Scheduler


def resolve_config(
    model: str,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    max_model_len: int | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    enable_prefix_caching: bool = True,
    scheduler: SchedulerConfig | None = None,
    parallel: ParallelConfig | None = None,
    memory_bytes: int | None = None,
) -> EngineConfig:
    """Read the model's shape and size the block pool.

    Args:
        model: a Hugging Face folder, a hub id, or the demo model's name.
        num_blocks: None takes enough for ordinary traffic, as memory allows.
        memory_bytes: what weights and pool may take; None asks this host.

    Raises:
        NotFound: no such model.
        ConfigError: settings that cannot work, or do not fit the memory.
    """
    scheduler = scheduler or SchedulerConfig()
    shape = ModelConfig.from_folder(ensure_checkpoint(model), dtype, max_model_len, quantization)
    if memory_bytes is None:
        memory_bytes = available_bytes()
    if num_blocks is None:
        num_blocks = default_num_blocks(shape, block_size, scheduler.max_num_seqs, memory_bytes)
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
    check_memory(shape, cache, memory_bytes)
    return EngineConfig(model=shape, cache=cache, scheduler=scheduler, parallel=parallel or ParallelConfig())


def build_scheduler(config: EngineConfig) -> Scheduler:
    return Scheduler(config.scheduler, config.cache, config.model.max_model_len, config.model.eos_token_ids)


def build_executor(config: EngineConfig, launcher: RankLauncher | None = None) -> Executor:
    """Load the weights, make the KV pool and run one step, so that the first request is not slower than the next.

    Args:
        launcher: where the ranks come from if there are several; None starts them on this host.

    Raises:
        NotFound, ConfigError: the model cannot be loaded.
        EngineDead: a rank could not start.
    """
    if config.parallel.num_ranks > 1:
        return RankExecutor(config, launcher or LocalRanks(config.parallel))
    from shoal_replica.model.model_runner import ModelRunner  # brings torch, which the core does without

    runner = ModelRunner(config.model, config.cache, config.parallel)
    runner.warm_up()
    # What has been loaded lives as long as the engine; walking it takes the collector 90 ms, amid somebody's stream.
    gc.collect()
    gc.freeze()
    return runner
