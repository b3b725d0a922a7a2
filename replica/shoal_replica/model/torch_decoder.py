"""A decoder on torch's operators: where the native kernels were not built, or do not support a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.draws import RowOperators
from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.model.block_tensors import BlockTensors
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.lora import LoraPair, load_adapter, step_adapters
from shoal_replica.model.parallel_group import ParallelGroup
from shoal_replica.model.quantization import quantize, widen
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.weights import DTYPES, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard


class TorchDecoder:
    """``LlamaDecoder`` on a CPU over zeroed blocks, [layers, 2, blocks, kv_heads, block_size, head_size] in one tensor.
    A CPU's memory is the host's, so the host rows are simply the last of these blocks.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        self._shard = shard = shard or whole_shard(model)
        self._device = torch.device(parallel.device)
        self._adapters: dict[str, dict[str, LoraPair]] = {}
        dtype = DTYPES[model.dtype]
        weights = widen(quantize(model, stream_weights(model, self._device, shard)), dtype)
        self._model = LlamaDecoder(model, dict(weights), shard, group)
        num_heads = len(shard.kv_heads)
        self._first_row = cache.num_blocks
        num_blocks = cache.num_blocks + cache.num_host_blocks
        shape = (len(shard.layers), 2, num_blocks, num_heads, cache.block_size, model.head_size)
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        self._pool = BlockTensors([tensor for layer in whole for tensor in layer], f"layers from {shard.layers.start}")
        self._caches = [(layer[0], layer[1]) for layer in whole]

    @property
    def progress(self) -> int:
        return self._model.num_layers_begun

    @property
    def maxima(self) -> None:
        return None

    @property
    def row_operators(self) -> RowOperators:
        return ops

    def load(self, adapter: AdapterConfig) -> None:
        self._adapters[adapter.name] = dict(load_adapter(adapter, self._model.config, self._shard, self._device))

    def unload(self, name: str) -> None:
        del self._adapters[name]

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        metadata = AttentionMetadata(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=torch.from_numpy(step.block_tables).to(self._device),
            slot_mapping=torch.from_numpy(step.slot_mapping).to(self._device),
        )
        return self._model(
            torch.from_numpy(step.input_ids).to(self._device),
            torch.from_numpy(step.positions).to(self._device),
            self._caches,
            metadata,
            torch.tensor(sample_rows, dtype=torch.int64, device=self._device),
            step_adapters(step.adapters or (), step.query_start_loc, self._adapters),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for keys, values in self._caches:
            ops.copy_blocks(keys, values, pairs)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(block, self._first_row + row) for block, row in moves])

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(self._first_row + row, block) for row, block in moves])

    @property
    def block_layout(self) -> str:
        return self._pool.layout

    @property
    def copies_beside_steps(self) -> bool:
        return True

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self._pool.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], contents: memoryview) -> None:
        self._pool.write(block_ids, contents)

    def close(self) -> None:
        self._caches, self._pool = [], BlockTensors([], "")
