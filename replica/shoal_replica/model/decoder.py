"""The model with its weights and KV blocks, as the runner sees it, and which kind serves where."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from shoal_kernels.draws import RowOperators
from shoal_kernels.native_buffers import RowMaxima
from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.model.cpu_kernels import choose_kernels
from shoal_replica.model.native_cpu_decoder import NativeCpuDecoder
from shoal_replica.model.npu_memory import open_device
from shoal_replica.model.parallel_group import ParallelGroup, SoleRank
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.torch_decoder import TorchDecoder
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """Computes steps over its own KV blocks: the cache's ``num_blocks``, and ``num_host_blocks`` rows in host memory.

    With several ranks, each computes its shard of every step; the rank that samples has the complete logits.
    """

    @property
    def progress(self) -> int:
        """A number that changes as a step progresses. Another thread may read it, until ``close``."""
        ...

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        """Write the KV of a step's tokens. Returns float32 logits [len(sample_rows), vocab_size], valid until the next
        call.

        Ranks that do not sample may return none, and so may one that has ``maxima`` if only these are wanted.

        Raises:
            CollectiveError: another rank did not take part.
        """
        ...

    @property
    def maxima(self) -> RowMaxima | None:
        """The maxima of the rows of the last ``compute``; None if the sampler has to find them."""
        ...

    @property
    def row_operators(self) -> RowOperators:
        """Operators on the logits that ``compute`` returns, by the threads that computed them."""
        ...

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        """Load an adapter, which steps then name, a product at a time. If it is closed before its end, nothing stays.

        Raises:
            ConfigError: from ``read_adapter``.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Free an adapter, which no later step names."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks; ``pairs`` are (source, destination), and every source is read as it was before the call."""
        ...

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to rows, pairs of (block, row). The blocks may be overwritten as soon as it returns."""
        ...

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows to blocks, pairs of (row, block)."""
        ...

    @property
    def block_layout(self) -> str:
        """Kind and shape of what ``read_blocks`` returns: decoders with the same one can exchange blocks."""
        ...

    @property
    def copies_beside_steps(self) -> bool:
        """Whether another thread may read and write blocks that no step uses while one runs."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """The contents of blocks."""
        ...

    def write_blocks(self, block_ids: Sequence[int], contents: memoryview) -> None:
        """Fill blocks with contents of the same layout. Raises ValueError if they are not of that many blocks."""
        ...

    def close(self) -> None:
        """Release weights and KV blocks. No call may follow."""
        ...


def make_decoder(
    model: ModelConfig,
    cache: CacheConfig,
    parallel: ParallelConfig,
    shard: Shard | None = None,
    group: ParallelGroup | None = None,
) -> Decoder:
    """The decoder for the device: on an NPU its own; on a CPU the native kernels if they were built and support the
    model, else torch.

    Args:
        shard, group: what this rank holds and how it reaches the others; None means the whole model on one rank.

    Raises:
        NotFound, ConfigError: from ``stream_weights``.
    """
    if parallel.device == "npu":
        open_device()  # raises a clear error if torch_npu is missing
        from shoal_replica.model.npu_decoder import NpuDecoder

        return NpuDecoder(model, cache, parallel, shard, group)
    shard, group = shard or whole_shard(model), group or SoleRank()
    kernels = choose_kernels(model, cache, parallel)
    if group.all_agree(kernels.is_native):
        decoder = NativeCpuDecoder(model, cache, parallel, shard, group)
        logger.info("the native %s kernels serve", decoder.kernels)
        return decoder
    why = kernels.why_torch or "another rank has no native kernels"
    logger.warning("torch's operators serve, which are slower: %s", why)
    return TorchDecoder(model, cache, parallel, shard, group)
