"""``LlamaDecoder`` on an Ascend NPU: one input transfer per step, and captured graphs for decode-only steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels import npu_limits, ops
from shoal_kernels.integers import IntegerWeight
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.npu_graph import StepGraph
from shoal_kernels.npu_int8 import round_weight
from shoal_kernels.npu_swap import BlockSwap
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.memory_plan import num_staging_blocks
from shoal_replica.model.layers import Weights
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.lora import step_adapters
from shoal_replica.model.npu_memory import EXTRA_BLOCKS, check_shape, open_device
from shoal_replica.model.operator_decoder import OperatorDecoder
from shoal_replica.model.parallel_group import ParallelGroup
from shoal_replica.model.parameters import EMBEDDING, HEAD
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.weights import DTYPES, load_weights, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard

ALIGNMENT = 8  # int32 numbers, i.e. 32 bytes: the alignment of the device's transfers

logger = logging.getLogger(__name__)


class NpuDecoder(OperatorDecoder):
    """Uses the first device that the process sees; Ray, or whatever started the process, chooses which that is.

    A step whose sequences all decode one token, all sample and have no adapter runs as the smallest captured graph that
    holds them, padded with sequences in a block reserved for that. All other steps, and those too large for a graph,
    run eagerly.

    Raises:
        NotFound: from ``load_weights``.
        ConfigError: a model, or a torch_npu, that cannot run; also from ``load_weights``.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        shard = shard or whole_shard(model)
        device = open_device()
        _check(model, cache, shard)
        torch_npu.npu.set_compile_mode(jit_compile=False)  # use operator binaries, do not compile for each new shape
        decoder = LlamaDecoder(model, _load_weights(model, device, shard), shard, group)
        self._num_blocks, self._block_size = cache.num_blocks + EXTRA_BLOCKS, cache.block_size
        shape = ops.cache_shape("npu", self._num_blocks, len(shard.kv_heads), cache.block_size, model.head_size)

        def blocks() -> Tensor:
            return torch.zeros(shape, dtype=DTYPES[model.dtype], device=device)

        super().__init__(decoder, shard, device, [(blocks(), blocks()) for _ in shard.layers])
        self._swap: BlockSwap | None = None
        if cache.num_host_blocks:
            self._swap = BlockSwap(self._pool.tensors, cache.num_host_blocks, num_staging_blocks(cache))
        self._inputs = PackedInputs(device)
        self._group = decoder.group
        self._calls_of_graph = 0
        self._graphs: dict[int, StepGraph] = {}
        self._graph_inputs: dict[int, _GraphInputs] = {}
        self._table_width = -(-model.max_model_len // cache.block_size)
        # With several stages a step waits for another process, which a graph cannot do.
        if parallel.graph_sizes and shard.num_stages == 1:
            self._capture(parallel.graph_sizes)

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        logits = self._launch(step, sample_rows)
        if not self._shard.samples:
            # Wait, as the sampling rank does for its tokens: a hang or failure then shows in the step of its own rank.
            torch_npu.npu.current_stream().synchronize()
        return logits

    def _launch(self, step: StepArrays, sample_rows: Sequence[int]) -> Tensor:
        num_seqs = len(step.seq_lens)
        adapters = step_adapters(step.adapters or (), step.query_start_loc, self._adapters)
        if adapters is None and len(step.input_ids) == num_seqs and list(sample_rows) == list(range(num_seqs)):
            # If graphs of sizes in between are missing: at most as much padding as a block has slots.
            sizes = [size for size in self._graphs if num_seqs <= size <= num_seqs + self._block_size]
            size = min(sizes, default=0)
            if size and self._blocks_fit(step.seq_lens, size - num_seqs):
                return self._replay(size, step)
        rows = np.asarray(sample_rows, np.int64)
        tables = step.block_tables
        ids, positions, slots, samples, table = self._inputs.load(
            step.input_ids, step.positions, step.slot_mapping, rows, tables.ravel()
        )
        metadata = AttentionMetadata(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=table.view(tables.shape),
            slot_mapping=slots,
        )
        return self._model(ids, positions, self._caches, metadata, samples, adapters)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        assert self._swap is not None
        self._swap.move_out(moves)

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        assert self._swap is not None
        self._swap.move_in(moves)

    @property
    def copies_beside_steps(self) -> bool:
        return False

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs = {}
        self._graph_inputs = {}
        self._swap = None
        super().close()
        torch_npu.npu.empty_cache()

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The batch sizes for which there are graphs."""
        return tuple(sorted(self._graphs))

    def _blocks_fit(self, seq_lens: Sequence[int], num_padding: int) -> bool:
        """Whether the attention operator takes all sequences in the single call that the graph has recorded."""
        return sum(-(-n // self._block_size) for n in seq_lens) + num_padding <= self._num_blocks

    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs, largest first: the smaller ones then fit into its memory, and if the device can hold no more
        graphs, smaller batches can still use a larger one."""
        pool = None
        for size in sorted(sizes, reverse=True):
            if size > self._num_blocks:
                continue
            inputs = _GraphInputs(self._device, size, self._table_width, self._num_blocks, self._block_size)
            # The longest possible, so that the operator's workspace is large enough for every replay.
            longest = min(self._table_width, self._num_blocks // size) * self._block_size
            metadata = AttentionMetadata(
                query_start_loc=list(range(size + 1)),
                seq_lens=[longest] * size,
                block_tables=inputs.tables,
                slot_mapping=inputs.slots,
            )

            def run(inputs: _GraphInputs = inputs, metadata: AttentionMetadata = metadata) -> Tensor:
                return self._model(inputs.ids, inputs.positions, self._caches, metadata, inputs.rows)

            run()
            calls_before = self._group.num_calls
            try:
                graph = StepGraph(run, pool)
            except RuntimeError as error:
                logger.warning("no graph of %d decodes or fewer, such steps run without: %s", size, error)
                return
            pool = graph.pool
            self._calls_of_graph = self._group.num_calls - calls_before
            self._graphs[size] = graph
            self._graph_inputs[size] = inputs

    def _replay(self, size: int, step: StepArrays) -> Tensor:
        inputs = self._graph_inputs[size]
        inputs.load(step)
        num_seqs = len(step.seq_lens)
        self._group.num_calls += self._calls_of_graph
        self._model.num_layers_begun += len(self._model.layers)
        logits = self._graphs[size].replay([*step.seq_lens, *[1] * (size - num_seqs)])
        return logits[:num_seqs]


class PackedInputs:
    """A step's integers, copied from pinned memory to the device in one transfer."""

    def __init__(self, device: torch.device, num_numbers: int = 0) -> None:
        self._device = device
        self._copied = torch_npu.npu.Event()
        self._reserve(num_numbers)

    def load(self, *arrays: NDArray[np.integer]) -> list[Tensor]:
        """The one-dimensional arrays as int32 tensors on the device; valid until the next ``load``."""
        starts = np.cumsum([0, *(-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        # The last copy may still be reading the buffer, as nothing waits for a step that samples no token.
        self._copied.synchronize()
        if starts[-1] > len(self._host):
            self._reserve(2 * starts[-1])
        numbers = self._host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            numbers[start : start + array.size] = array
        self._on_device[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        self._copied.record()
        return [self._on_device[start : start + array.size] for array, start in zip(arrays, starts, strict=False)]

    def _reserve(self, num_numbers: int) -> None:
        self._host = torch.zeros(num_numbers, dtype=torch.int32, pin_memory=True)
        self._on_device = torch.zeros(num_numbers, dtype=torch.int32, device=self._device)


class _GraphInputs:
    """The fixed tensors from which a graph of ``size`` decodes reads.

    Padding consists of sequences of one token over the cache's last block. Their slots count down from its end, so that
    they differ; a graph of padding alone, as during capture, continues into the blocks before it.
    """

    def __init__(self, device: torch.device, size: int, table_width: int, num_blocks: int, block_size: int) -> None:
        self._size = size
        self._width = table_width
        self._last_block = num_blocks - 1
        self._padding_slots = num_blocks * block_size - 1 - np.arange(size)
        self._packed = PackedInputs(device, 4 * (size + ALIGNMENT) + size * table_width + ALIGNMENT)
        self.ids, self.positions, self.slots, self.rows, self.tables = self.load(None)

    def load(self, step: StepArrays | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Load a step's inputs, padded to ``size``, into the tensors; None loads padding alone."""
        num_seqs = 0 if step is None else len(step.seq_lens)
        ids, positions = np.zeros(self._size, np.int64), np.zeros(self._size, np.int64)
        slots = np.empty(self._size, np.int64)
        slots[num_seqs:] = self._padding_slots[: self._size - num_seqs]
        tables = np.full((self._size, self._width), self._last_block, np.int32)
        if step is not None:
            ids[:num_seqs], positions[:num_seqs], slots[:num_seqs] = step.input_ids, step.positions, step.slot_mapping
            tables[:num_seqs, : step.block_tables.shape[1]] = step.block_tables
        loaded = self._packed.load(ids, positions, slots, np.arange(self._size), tables.ravel())
        return loaded[0], loaded[1], loaded[2], loaded[3], loaded[4].view(self._size, self._width)


def _load_weights(model: ModelConfig, device: torch.device, shard: Shard) -> Weights:
    """Load weights onto the device. For int8, projections of attention and MLP are rounded on the host, so that the
    device never holds both versions.
    """
    if model.quantization == "none":
        return load_weights(model, device, shard)
    loaded: dict[str, Any] = {}
    for name, weight in stream_weights(model, torch.device("cpu"), shard):
        if name == HEAD and model.tie_word_embeddings:
            loaded[name] = loaded[EMBEDDING]
            continue
        is_rounded = name.endswith("_proj.weight") and ".experts." not in name
        plain = weight.widen(DTYPES[model.dtype]) if isinstance(weight, IntegerWeight) else weight
        loaded[name] = (round_weight(plain) if is_rounded else plain).to(device)
    return cast(Weights, loaded)  # ``ops.linear`` accepts both kinds


def _check(model: ModelConfig, cache: CacheConfig, shard: Shard) -> None:
    check_shape(model, cache, shard)
    required = npu_limits.REQUIRED | (npu_limits.EXPERTS if model.moe else {})
    required |= npu_limits.INT8 if model.quantization != "none" else {}
    missing = npu_limits.missing_operators(torch.ops.npu, required)
    if missing:
        raise ConfigError(
            f"device: torch_npu {torch_npu.__version__} has no {', '.join(missing)}; versions 2.10 to 2.13 have"
        )
