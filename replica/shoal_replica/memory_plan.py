"""What memory will be used for, calculated before anything is loaded: on a rank's NPU, or on a CPU replica's host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal_replica.config import CacheConfig, ParallelConfig, SchedulerConfig
from shoal_replica.errors import ConfigError
from shoal_replica.executor import MAX_SCORED_TOKENS
from shoal_replica.model.cpu_kernels import choose_kernels
from shoal_replica.model.parameters import NORMS
from shoal_replica.model_config import DTYPE_BYTES, ModelConfig
from shoal_replica.shard import Shard, make_shard
from shoal_replica.weight_formats import GROUP_SIZE

GIB = 2**30
MIB = 2**20
# Share of an NPU's free memory that is planned for; the rest covers allocator fragmentation.
DEVICE_SHARE = 0.95
# HCCL keeps HCCL_BUFFSIZE (200 MiB unless changed) for each direction of a communicator.
COMMUNICATOR_BYTES = 2 * 200 * MIB
# The operators' workspaces, and what each graph holds beside the activations that all graphs share.
WORKSPACE_BYTES = 256 * MIB
GRAPH_BYTES = 16 * MIB
# Staging blocks on an NPU for transfers to and from host memory.
STAGING_BLOCKS = 8
# The part of a sum that a CPU rank's native decoder shares with the others at once, double-buffered: as many rows as a
# second-level cache holds.
EXCHANGE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank on an NPU, or of all ranks on a CPU host. ``usable`` is what may be taken, 0 if unknown;
    ``adapters`` is an upper bound. ``tables`` are those of rotary angles, and on a CPU that of the sequences' tokens.
    ``loading`` is what loading takes beside weights and tables, when only these are in use.

    ``block`` is the size of one KV block. ``num_other_blocks`` are allocated beside the pool: on an NPU, staging blocks
    for transfers to host memory; on a CPU, the ``num_host_blocks`` themselves. ``kernels`` names the CPU kernels used.
    """

    device: str
    dtype: str
    usable: int
    weights: int
    activations: int
    communication: int
    graphs: int
    block: int
    adapters: int = 0
    tables: int = 0
    loading: int = 0
    num_blocks: int
    num_host_blocks: int = 0
    num_other_blocks: int = 0
    kernels: str = ""

    @property
    def room_for_blocks(self) -> int:
        """How many KV blocks fit beside everything else; below 0 if everything else alone does not fit."""
        rest = self.weights + self.adapters + self.tables + self.activations + self.communication + self.graphs
        room = (self.usable - rest) // self.block - self.num_other_blocks
        if self.weights + self.tables + self.loading > self.usable:
            return min(room, -self.num_other_blocks - 1)
        return room

    def report(self) -> str:
        """One line for the log."""
        parts = [
            ("weights", self.weights),
            *([("adapters", self.adapters)] if self.adapters else []),
            ("tables", self.tables),
            ("activations", self.activations),
            ("communication", self.communication),
            ("graphs", self.graphs),
            (f"{self.num_blocks} KV blocks", self.num_blocks * self.block),
        ]
        on_host = f"; kernels {self.kernels}" if self.kernels else ""
        if self.num_host_blocks and self.device == "cpu":
            parts.append((f"{self.num_host_blocks} host blocks", self.num_host_blocks * self.block))
        elif self.num_host_blocks:
            parts.append(("transfers", self.num_other_blocks * self.block))
            on_host = (
                f"; {self.num_host_blocks} host blocks {self.num_host_blocks * self.block / GIB:.2f} GiB on the host"
            )
        shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts)
        usable = f" of {self.usable / GIB:.2f}" if self.usable else ""
        return f"{self.device}, {self.dtype}: {shown}{usable} GiB{on_host}"

    def check(self, changes: Iterable[tuple[str, MemoryPlan]] = ()) -> None:
        """Raise ConfigError if the plan does not fit, naming the smallest change that makes it fit.

        Args:
            changes: changes to settings other than the numbers of blocks, smallest first, each with its plan.
        """
        room = self.room_for_blocks
        if self.num_blocks <= room:
            return
        if room > 0:
            raise ConfigError(f"num_blocks: got {self.num_blocks}; {self.report()}; num_blocks={room} fits")
        if self.num_other_blocks + room >= self.num_blocks:
            fitting = self.num_other_blocks + room - self.num_blocks if self.device == "cpu" else 0
            raise ConfigError(f"num_host_blocks: {self.report()}; num_host_blocks={fitting} fits")
        for change, plan in changes:
            if (room := plan.room_for_blocks) > 0:
                field = change.partition("=")[0]
                raise ConfigError(f"{field}: {self.report()}; {change} fits, with num_blocks up to {room}")
        what = "not one block fits" if self.weights <= self.usable else "the weights alone do not fit"
        if replace(self, loading=0).room_for_blocks > 0:
            what = f"loading does not fit, which takes {self.loading / GIB:.2f} beside weights and tables"
        raise ConfigError(f"model: {self.report()}; {what}")


def plan_memory(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    shard: Shard,
    cache: CacheConfig,
    free_bytes: int,
    adapter_bytes: int = 0,
) -> MemoryPlan:
    """The plan of the rank that holds ``shard``; ``free_bytes`` are free on its device before anything is loaded.
    ``adapter_bytes`` are those of the whole model's adapters.
    """
    return MemoryPlan(
        device=parallel.device,
        dtype=_weights_of_npu(model),
        usable=int(free_bytes * DEVICE_SHARE),
        weights=shard_weight_bytes(model, shard),
        adapters=adapter_bytes,
        tables=rotary_bytes(model, DTYPE_BYTES[model.dtype]),
        activations=WORKSPACE_BYTES + activation_bytes(model, shard, scheduler),
        communication=COMMUNICATOR_BYTES * (parallel.tensor_parallel_size > 1)
        + COMMUNICATOR_BYTES * (shard.num_stages > 1),
        graphs=GRAPH_BYTES * len(parallel.graph_sizes or ()),
        block=shard.block_bytes(model, cache.block_size),
        num_blocks=cache.num_blocks,
        num_host_blocks=cache.num_host_blocks,
        num_other_blocks=num_staging_blocks(cache),
    )


def plan_host(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    cache: CacheConfig,
    free_bytes: int,
    ranks: Sequence[int] | None = None,
    adapter_bytes: int = 0,
) -> MemoryPlan:
    """The plan of a CPU replica, or of the given ``ranks`` of it, which share one host's ``free_bytes``.
    ``adapter_bytes`` are those of the whole model's adapters.
    """
    shards = [make_shard(model, parallel, rank) for rank in (range(parallel.num_ranks) if ranks is None else ranks)]
    plain = replace(model, quantization="none", stored=None)
    kernels = choose_kernels(model, cache, parallel)
    # The native decoder holds integers; torch's operators widen them. With tile registers (AMX) it holds bf16 weights
    # in three quarters of what is planned; the temporary memory for loading the largest matrix fits into the rest.
    rounded = model.weight_bytes / plain.weight_bytes if kernels.is_native else 1.0
    weights = int(sum(shard_weight_bytes(plain, shard) for shard in shards) * rounded)
    screen = 0
    is_screened = kernels.is_native and model.dtype == "bfloat16" and model.has_plain_tables
    if is_screened and model.hidden_size % GROUP_SIZE == 0 and parallel.tensor_parallel_size == 1:
        # A second copy of the head, in 8 bits and a scale per 32 weights, by which greedy tokens are found.
        screen = model.vocab_size * model.hidden_size * 17 // 16 * sum(shard.is_last_stage for shard in shards)
    # One parameter is held beside the weights, of experts all of a layer; and once more where it is rounded.
    loading = sum(_largest_parameter_bytes(plain, shard) for shard in shards)
    if kernels.is_native and rounded < 1:
        loading += int(loading * rounded)
    # A table of angles is made from its cosines and sines, and copied by native kernels.
    loading = max(loading, len(shards) * 2 * rotary_bytes(replace(model, window_rope_theta=None), 4))
    tables = rotary_bytes(model, 4 if kernels.is_native else DTYPE_BYTES[model.dtype])
    tables += sequence_table_bytes(model, scheduler, cache)
    # What is summed, or handed to the next stage: one buffer to send and one to receive.
    handed = 2 * scheduler.max_num_batched_tokens * model.hidden_size * 4
    summed = 2 * EXCHANGE_BYTES if kernels.is_native else handed
    held = "" if model.quantization == "none" else f" with {model.quantization} weights"
    communication = summed * (parallel.tensor_parallel_size > 1) + handed * (parallel.pipeline_parallel_size > 1)
    return MemoryPlan(
        device=parallel.device,
        dtype=f"{model.dtype}{held}{'' if kernels.is_native or not held else ' widened'}",
        usable=free_bytes,
        weights=weights,
        adapters=adapter_bytes * len(shards),
        tables=tables * len(shards),
        activations=screen + sum(activation_bytes(model, shard, scheduler) for shard in shards),
        loading=loading,
        communication=communication * len(shards),
        graphs=0,
        block=sum(shard.block_bytes(model, cache.block_size) for shard in shards),
        num_blocks=cache.num_blocks,
        num_host_blocks=cache.num_host_blocks,
        num_other_blocks=cache.num_host_blocks,
        kernels=str(kernels),
    )


def _weights_of_npu(model: ModelConfig) -> str:
    """The number formats in which an NPU holds the weights: not all of them become int8."""
    if model.quantization == "none":
        return model.dtype
    return f"{model.dtype} with int8 projections (embedding, head{', experts' if model.moe else ''} not)"


def rotary_bytes(model: ModelConfig, size: int) -> int:
    """Of the tables of rotary angles, in numbers of ``size`` bytes: one more if layers with a window have their own."""
    return (1 + (model.window_rope_theta is not None)) * model.max_model_len * model.head_size * size


def sequence_table_bytes(model: ModelConfig, scheduler: SchedulerConfig, cache: CacheConfig) -> int:
    """Of a ``SequenceTable`` whose rows have all held sequences of full length."""
    num_tokens = model.max_model_len + 1
    return scheduler.max_num_seqs * (8 * num_tokens + 4 * -(-num_tokens // cache.block_size))


def num_staging_blocks(cache: CacheConfig) -> int:
    """Staging blocks on an NPU for transfers to and from host memory."""
    return min(STAGING_BLOCKS, cache.num_host_blocks)


def shard_weight_bytes(model: ModelConfig, shard: Shard) -> int:
    """Bytes of a rank's weights as an NPU holds them: int8 takes one byte per weight in attention and dense MLPs."""
    hidden, head, size = model.hidden_size, model.head_size, DTYPE_BYTES[model.dtype]
    rounded = size if model.quantization == "none" else 1
    attention = hidden * head * 2 * (len(shard.heads) + len(shard.kv_heads)) * rounded
    total = 0
    for layer in shard.layers:
        total += attention + len(NORMS[model.norm_placement]) * hidden * size
        if model.moe is not None and layer in model.moe.layers:
            experts = 3 * model.moe.intermediate_size * len(shard.experts)
            total += hidden * (experts + model.moe.num_experts) * size + 3 * hidden * len(shard.shared_mlp) * rounded
        else:
            total += 3 * hidden * len(shard.mlp) * rounded
    table = len(shard.vocab) * hidden * size
    is_shared = model.tie_word_embeddings and shard.num_stages == 1
    total += hidden * size * shard.is_last_stage  # the last norm
    return total + table * (shard.is_first_stage + shard.is_last_stage - is_shared)


def _largest_parameter_bytes(model: ModelConfig, shard: Shard) -> int:
    """Bytes of the largest packed parameter of a rank's layers, in the model's dtype."""
    inner = max(len(shard.mlp), len(shard.shared_mlp))
    if model.moe is not None:
        inner = max(inner, len(shard.experts) * model.moe.intermediate_size)
    return 2 * inner * model.hidden_size * DTYPE_BYTES[model.dtype]


def activation_bytes(model: ModelConfig, shard: Shard, scheduler: SchedulerConfig) -> int:
    """The most activation memory alive at once in a step, by shapes: in attention, MLP or experts, or at the logits."""
    size = DTYPE_BYTES[model.dtype]
    tokens, hidden, vocab = scheduler.max_num_batched_tokens, model.hidden_size, model.vocab_size
    heads, kv_heads = len(shard.heads) * model.head_size, len(shard.kv_heads) * model.head_size
    stream = 4 * hidden  # x, its norm, the residual, and the sum being computed
    attention = 2 * (heads + 2 * kv_heads) + 2 * heads  # QKV, projected and rotated; output and its projection
    mlp = 4 * max(len(shard.mlp), len(shard.shared_mlp))  # gate and up, their product, and its temporaries
    if model.moe is not None:
        chosen = model.moe.num_experts_per_token
        mlp = max(mlp, chosen * (3 * hidden + 4 * model.moe.intermediate_size)) + hidden * bool(model.moe.shared_size)
    step = tokens * size * (stream + max(attention, mlp))
    # Logits in the model's dtype and in float32; then for sampled rows: scaled, sorted with 8-byte indices, summed; and
    # for scored prompt tokens, which the same step may have, their log-probabilities; or as many drafts instead.
    logits = scheduler.max_num_seqs * vocab * (size + 4 + 4 * 4 + 2 * 8) + MAX_SCORED_TOKENS * vocab * (size + 4 + 4)
    return max(step, logits)
