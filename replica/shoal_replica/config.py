"""The configurations of an engine. Each component gets only the one it needs; all are frozen and resolved once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shoal_replica.adapter import AdapterConfig, adapter_bytes
from shoal_replica.errors import ConfigError
from shoal_replica.model_config import DTYPE_BYTES, ModelConfig

DEVICES = ("cpu", "npu")
DEFAULT_NUM_SEQS = 64
DEFAULT_BLOCK_SIZES = {"cpu": 16, "npu": 128}
DEFAULT_SPECULATIVE_TOKENS = {"cpu": 8, "npu": 0}  # what it gains on an NPU has not been measured
MAX_THREADS = 1024  # of a rank: beyond any machine's cores, a slip takes all the threads that its host can have
MAX_GRAPH_GAP = 128  # a graph is padded with sequences that share the slots of one block
SCHEDULING_POLICIES = ("fcfs", "priority", "deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The block pool: ``num_blocks`` blocks of ``block_size`` tokens. ``num_host_blocks`` more, in host memory, keep
    cached prefixes that the pool evicts. ``enable_partial_reuse`` lets a prompt that diverges from a cached prefix
    within a block copy the shared part of that block; simulations go without, as they know prompts by whole blocks.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_partial_reuse: bool = True
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("num_blocks", self.num_blocks, 1)
        _at_least("num_host_blocks", self.num_host_blocks, 0)
        if self.num_host_blocks and not self.enable_prefix_caching:
            raise ConfigError(f"num_host_blocks: got {self.num_host_blocks}; must be 0 without enable_prefix_caching")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step (running sequences and computed tokens), and the length and order of the waiting queue.

    ``num_speculative_tokens`` is how many draft tokens a step may compute for a sequence; 0 for none, None
    for the device's default, which ``resolve_config`` finds.
    """

    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    policy: str = "fcfs"
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_waiting", self.max_num_waiting, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; "
                f"must be at least max_num_seqs ({self.max_num_seqs}), one token for each running sequence"
            )
        if self.policy not in SCHEDULING_POLICIES:
            raise ConfigError(f"policy: got {self.policy!r}; must be one of {', '.join(SCHEDULING_POLICIES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Where the model runs. ``num_threads`` is per rank, for the CPU backend.

    A model is cut into ``pipeline_parallel_size`` stages of whole layers, and each stage is shared by
    ``tensor_parallel_size`` ranks. A rank without a heartbeat, or a step without progress, for ``rank_timeout_s``
    seconds counts as hung.

    Unless ``is_one_host``, the ranks may be on several hosts, and only they can see those hosts' memory.

    On an NPU, ``graph_sizes`` are the batch sizes for which a decode-only step is captured as a graph: () for none,
    None for ``default_graph_sizes``. ``device_memory_bytes`` is the memory a rank may take; None asks the device.
    """

    device: str = "cpu"
    num_threads: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank_timeout_s: float = 3.5  # with a pulse every 0.5 s and the time to kill, a hang ends within 5 s
    is_one_host: bool = True
    graph_sizes: tuple[int, ...] | None = None
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        _at_least("num_threads", self.num_threads, 1)
        if self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads: got {self.num_threads}; must be at most {MAX_THREADS}")
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if not 1.0 <= self.rank_timeout_s < math.inf:
            raise ConfigError(f"rank_timeout_s: got {self.rank_timeout_s!r}; must be at least 1 second")
        if self.device not in DEVICES:
            raise ConfigError(f"device: got {self.device!r}; must be one of {', '.join(DEVICES)}")
        sizes = sorted(self.graph_sizes or ())
        if any(size < 1 for size in sizes) or any(b - a > MAX_GRAPH_GAP for a, b in pairwise([0, *sizes])):
            raise ConfigError(f"graph_sizes: got {sizes}; must be at least 1 and rise by at most {MAX_GRAPH_GAP}")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to 32, then multiples of 32, up to ``max_num_seqs``: few graphs, with little padding in each."""
    sizes = [1, 2, 4, 8, 16, *range(32, max_num_seqs + 32, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All together, as needed to build an engine. ``adapters`` are those that requests may ask for."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    adapters: tuple[AdapterConfig, ...] = ()

    @property
    def adapter_bytes(self) -> int:
        """See ``adapter_bytes``."""
        return adapter_bytes(self.adapters, DTYPE_BYTES[self.model.dtype])

    def __post_init__(self) -> None:
        _at_most("tensor_parallel_size", self.parallel.tensor_parallel_size, self.model.num_heads, "attention heads")
        if self.model.qk_norm_spans_heads and self.parallel.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size: got {self.parallel.tensor_parallel_size}; must be 1 for "
                f"{self.model.architecture}, which norms all heads of queries and keys together"
            )
        if self.model.moe is not None:
            _at_most("tensor_parallel_size", self.parallel.tensor_parallel_size, self.model.moe.num_experts, "experts")
        _at_most("pipeline_parallel_size", self.parallel.pipeline_parallel_size, self.model.num_layers, "layers")
        room = self.cache.num_blocks * self.cache.block_size
        if room < self.model.max_model_len:
            # A sequence that does not fit the pool would wait forever, so a smaller pool lowers the length limit.
            object.__setattr__(self, "model", replace(self.model, max_model_len=room))


def _at_least(field_name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{field_name}: got {value!r}; must be an integer of at least {low}")


def _at_most(field_name: str, value: int, high: int, what: str) -> None:
    if value > high:
        raise ConfigError(f"{field_name}: got {value}; must be at most {high}, the model's number of {what}")
