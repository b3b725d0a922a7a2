"""What to change if a replica does not fit: settings that take less memory, starting with those that cost least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal_replica.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from shoal_replica.memory_plan import MemoryPlan, plan_host, plan_memory
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import make_shard
from shoal_replica.weight_formats import ACTIVATION_BITS, LAYER_BITS

Settings = tuple[ModelConfig, SchedulerConfig, ParallelConfig]
QUANTIZATIONS = {"cpu": ("int8", "int4"), "npu": ("int8",)}


def host_changes(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    cache: CacheConfig,
    free_bytes: int,
    ranks: Sequence[int] | None = None,
    adapter_bytes: int = 0,
) -> Iterator[tuple[str, MemoryPlan]]:
    """Possible changes to a CPU replica, each with the plan that it makes; see ``plan_host``."""
    for change, settings in _changes(model, scheduler, parallel):
        yield change, plan_host(*settings, cache, free_bytes, ranks, adapter_bytes)


def check_host(config: EngineConfig, free_bytes: int, ranks: Sequence[int] | None = None) -> None:
    """Raise ConfigError if a CPU replica, or the given ``ranks`` of it, do not fit a host's free memory."""
    settings = (
        config.model, config.scheduler, config.parallel, config.cache, free_bytes, ranks, config.adapter_bytes,
    )  # fmt: skip
    plan_host(*settings).check(host_changes(*settings))


def npu_changes(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    stage: int,
    cache: CacheConfig,
    free_bytes: int,
    adapter_bytes: int = 0,
) -> Iterator[tuple[str, MemoryPlan]]:
    """Possible changes to an NPU replica, each with the plan of a stage's first rank, which is as large as any other
    of that stage.
    """
    for change, (m, s, p) in _changes(model, scheduler, parallel):
        shard = make_shard(m, p, stage * p.tensor_parallel_size)
        yield change, plan_memory(m, s, p, shard, cache, free_bytes, adapter_bytes)


def _changes(
    model: ModelConfig, scheduler: SchedulerConfig, parallel: ParallelConfig
) -> Iterator[tuple[str, Settings]]:
    if parallel.graph_sizes:
        yield "graph_sizes=[]", (model, scheduler, replace(parallel, graph_sizes=()))
    most_seqs, most_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    for tokens in _halves(most_tokens, least=most_seqs):
        yield f"max_num_batched_tokens={tokens}", (model, replace(scheduler, max_num_batched_tokens=tokens), parallel)
    for seqs in _halves(most_seqs, least=1):
        tokens = max(seqs, most_tokens * seqs // most_seqs)
        fewer = replace(scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        yield f"max_num_seqs={seqs}, max_num_batched_tokens={tokens}", (model, fewer, parallel)
    bits = LAYER_BITS[model.quantization]
    has_bytes = model.quantization in ACTIVATION_BITS
    for name in ACTIVATION_BITS if has_bytes and parallel.device == "cpu" else QUANTIZATIONS[parallel.device]:
        if bits is None or (LAYER_BITS[name] or bits) < bits:
            yield f"quantization={name}", (replace(model, quantization=name), scheduler, parallel)
    if parallel.device == "npu":
        for size in range(parallel.tensor_parallel_size + 1, model.num_heads + 1):
            yield f"tensor_parallel_size={size}", (model, scheduler, replace(parallel, tensor_parallel_size=size))


def _halves(most: int, least: int) -> Iterator[int]:
    while (most := most // 2) >= least:
        yield most
