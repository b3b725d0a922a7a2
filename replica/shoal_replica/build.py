"""Turns plain settings into a configuration that fits this host, and a configuration into an engine's parts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shoal_replica.adapter import AdapterConfig, adapter_bytes
from shoal_replica.adapter_folder import read_adapters
from shoal_replica.checkpoint import ensure_adapter, ensure_checkpoint, read_ahead
from shoal_replica.config import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_SPECULATIVE_TOKENS,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    default_graph_sizes,
)
from shoal_replica.engine import Engine
from shoal_replica.errors import ConfigError
from shoal_replica.executor import Executor
from shoal_replica.memory import available_bytes, default_num_blocks
from shoal_replica.memory_advice import check_host, npu_changes
from shoal_replica.memory_plan import MemoryPlan, plan_host, plan_memory
from shoal_replica.model_config import DTYPE_BYTES, ModelConfig
from shoal_replica.ranks.executor import RankExecutor
from shoal_replica.ranks.launcher import LocalRanks, RankLauncher
from shoal_replica.scheduler import Scheduler
from shoal_replica.shard import make_shard

logger = logging.getLogger(__name__)


def resolve_config(
    model: str,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    max_model_len: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    scheduler: SchedulerConfig | None = None,
    parallel: ParallelConfig | None = None,
    memory_bytes: int | None = None,
    adapters: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Read the model's shape and size the block pool.

    Args:
        model: a Hugging Face folder, a hub id, or the demo model's name.
        block_size: None means 16 on the CPU and 128 on an NPU.
        num_blocks: None means enough for ordinary traffic on the CPU, and as many as fit on an NPU.
        num_host_blocks: blocks in host memory that keep cached prefixes evicted from the pool.
        memory_bytes: memory that weights and pool may take; None asks this host, or the NPU that this process sees.
        adapters: folders, or hub ids, of LoRA adapters by name.

    Raises:
        NotFound: no such model or adapter.
        ConfigError: the settings cannot work, or do not fit the memory.
    """
    scheduler, parallel = scheduler or SchedulerConfig(), parallel or ParallelConfig()
    on_npu = parallel.device == "npu"
    if scheduler.num_speculative_tokens is None:
        scheduler = replace(scheduler, num_speculative_tokens=DEFAULT_SPECULATIVE_TOKENS[parallel.device])
    if on_npu and dtype == "auto":
        dtype = "bfloat16"  # whatever the checkpoint's dtype: the only one served here that NPU attention takes
    shape = ModelConfig.from_folder(ensure_checkpoint(model), dtype, max_model_len, quantization)
    loras = find_adapters(adapters or {}, shape)
    lora_bytes = adapter_bytes(loras, DTYPE_BYTES[shape.dtype])
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZES[parallel.device]
    if parallel.graph_sizes is None:
        sizes = default_graph_sizes(scheduler.max_num_seqs) if on_npu else ()
        parallel = replace(parallel, graph_sizes=sizes)
    cache = CacheConfig(
        num_blocks=1 if num_blocks is None else num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    if on_npu:
        if num_blocks is None:
            cache = replace(cache, num_blocks=_fill_npu(shape, cache, scheduler, parallel, memory_bytes, lora_bytes))
        config = EngineConfig(model=shape, cache=cache, scheduler=scheduler, parallel=parallel, adapters=loras)
        _check_npu_shapes(config)
        return config
    if memory_bytes is None:
        memory_bytes = available_bytes()
    if num_blocks is None:
        plan = plan_host(shape, scheduler, parallel, cache, memory_bytes, adapter_bytes=lora_bytes)
        if plan.room_for_blocks < 1 and not parallel.is_one_host:
            raise ConfigError(
                "num_blocks: must be given where the ranks are on several hosts and this one alone does not hold them: "
                f"{plan.report()}"
            )
        cache = replace(cache, num_blocks=default_num_blocks(shape, plan, block_size, scheduler.max_num_seqs))
    config = EngineConfig(model=shape, cache=cache, scheduler=scheduler, parallel=parallel, adapters=loras)
    if parallel.is_one_host:  # otherwise the ranks on each host check that host's memory
        check_host(config, memory_bytes)
    return config


def _check_npu_shapes(config: EngineConfig) -> None:
    """Refuse shapes that the ranks could not run, before anything is loaded. Works on a node without NPUs too."""
    from shoal_replica.model.npu_memory import check_shape  # needs torch

    for rank in range(config.parallel.num_ranks):
        check_shape(config.model, config.cache, make_shard(config.model, config.parallel, rank))


def _fill_npu(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    free: int | None,
    lora_bytes: int,
) -> int:
    """The number of KV blocks that fit on every rank's device."""
    from shoal_replica.model.npu_memory import EXTRA_BLOCKS, free_bytes, max_num_blocks  # needs torch

    _check_npu_shapes(EngineConfig(model=model, cache=cache, scheduler=scheduler, parallel=parallel))
    if parallel.num_ranks > 1 and parallel.device_memory_bytes is None:
        raise ConfigError(
            "num_blocks: must be given, or device_memory_gib, for several NPU ranks: the pool is sized before they "
            "start, and only they see their devices"
        )
    free = parallel.device_memory_bytes or free or free_bytes()
    fitting = []
    for rank in range(parallel.num_ranks):
        shard = make_shard(model, parallel, rank)
        plan = plan_memory(model, scheduler, parallel, shard, cache, free, lora_bytes)
        plan.check(npu_changes(model, scheduler, parallel, shard.stage, cache, free, lora_bytes))
        fitting.append(min(plan.room_for_blocks, max_num_blocks(model, shard)) - EXTRA_BLOCKS)
    return max(1, min(fitting))


def plan_replica(config: EngineConfig) -> MemoryPlan:
    """The memory that a replica is about to take: of its host, or of each NPU, going by the first rank's share.

    With several NPU ranks, or ranks on several hosts, free memory is known only after they have started. ``usable`` is
    then 0, which means unknown, unless ``device_memory_bytes`` gives it for an NPU.
    """
    parallel = config.parallel
    if parallel.device == "cpu":
        free = available_bytes() if parallel.is_one_host else 0
        return plan_host(
            config.model, config.scheduler, parallel, config.cache, free, adapter_bytes=config.adapter_bytes
        )
    free = parallel.device_memory_bytes or 0
    if not free and parallel.num_ranks == 1:
        from shoal_replica.model.npu_memory import free_bytes  # needs torch

        free = free_bytes()
    shard = make_shard(config.model, parallel, 0)
    return plan_memory(config.model, config.scheduler, parallel, shard, config.cache, free, config.adapter_bytes)


def adapter_names(config: EngineConfig) -> set[str]:
    return {adapter.name for adapter in config.adapters}


def find_adapters(sources: Mapping[str, str], model: ModelConfig) -> tuple[AdapterConfig, ...]:
    """The adapters of ``model`` at ``sources``: by name, folders or hub ids, from which they are fetched.

    Raises:
        NotFound, ConfigError: an adapter is missing, or not one of the model; it is named.
    """
    return read_adapters({name: str(ensure_adapter(name, source)) for name, source in sources.items()}, model)


def build_scheduler(config: EngineConfig, adapters: Collection[str] | None = None) -> Scheduler:
    """``adapters``: names of those that requests may ask for, which may change; by default, the configuration's."""
    model, names = config.model, adapter_names(config) if adapters is None else adapters
    return Scheduler(config.scheduler, config.cache, model.max_model_len, model.eos_token_ids, names)


def build_engine(config: EngineConfig, executor: Executor) -> Engine:
    """An engine whose adapters may be changed while it runs."""
    adapters = adapter_names(config)
    return Engine(build_scheduler(config, adapters), executor, adapters=adapters)


def build_executor(config: EngineConfig, launcher: RankLauncher | None = None) -> Executor:
    """Load the weights, allocate the KV pool and warm up, so that the first request is not slower than the next.

    Args:
        launcher: starts the ranks if there are several; None starts them on this host.

    Raises:
        NotFound, ConfigError: the model cannot be loaded.
        EngineDead: a rank could not start.
    """
    if config.parallel.device == "cpu":
        logger.info("%s", plan_replica(config).report())
    if config.parallel.num_ranks > 1:
        return RankExecutor(config, launcher or LocalRanks(config.parallel))
    with _paused_collector():
        return _build_runner(config)


def _build_runner(config: EngineConfig) -> Executor:
    read_ahead(Path(config.model.folder))
    from shoal_replica.model.model_runner import ModelRunner  # imports torch, which the core does without

    if config.parallel.device == "npu":
        from shoal_replica.model.npu_memory import check_memory as check_npu_memory

        check_npu_memory(config, rank=0)
    max_num_seqs = config.scheduler.max_num_seqs
    runner = ModelRunner(
        config.model, config.cache, config.parallel, adapters=config.adapters, max_num_seqs=max_num_seqs
    )
    runner.warm_up()
    # Everything loaded so far lives as long as the engine, and one traversal of it by the garbage collector takes
    # 90 ms in the middle of a stream. No collection first: there is no garbage yet.
    gc.freeze()
    return runner


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Importing torch makes hundreds of thousands of objects, which the collector would traverse again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
