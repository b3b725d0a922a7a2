"""A decoder on torch's operators: where the native kernels were not built, or do not support a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.lora import step_adapters
from shoal_replica.model.operator_decoder import OperatorDecoder
from shoal_replica.model.parallel_group import ParallelGroup
from shoal_replica.model.quantization import quantize, widen
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.weights import DTYPES, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard


class TorchDecoder(OperatorDecoder):
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
        shard = shard or whole_shard(model)
        device, dtype = torch.device(parallel.device), DTYPES[model.dtype]
        weights = widen(quantize(model, stream_weights(model, device, shard)), dtype)
        decoder = LlamaDecoder(model, dict(weights), shard, group)
        self._first_row = cache.num_blocks
        num_blocks = cache.num_blocks + cache.num_host_blocks
        shape = (len(shard.layers), 2, num_blocks, len(shard.kv_heads), cache.block_size, model.head_size)
        caches = [(layer[0], layer[1]) for layer in torch.zeros(shape, dtype=dtype, device=device)]
        super().__init__(decoder, shard, device, caches)

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

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(block, self._first_row + row) for block, row in moves])

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(self._first_row + row, block) for row, block in moves])

    @property
    def copies_beside_steps(self) -> bool:
        return True
