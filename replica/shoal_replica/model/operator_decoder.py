"""What decoders on torch's operators have in common."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.draws import RowOperators
from shoal_replica.adapter import AdapterConfig
from shoal_replica.model.block_tensors import BlockTensors
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.lora import LoraPair, read_adapter
from shoal_replica.shard import Shard


class OperatorDecoder:
    """``LlamaDecoder`` over KV blocks that are tensors, keys and values of each layer, on one device."""

    def __init__(
        self, model: LlamaDecoder, shard: Shard, device: torch.device, caches: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._model = model
        self._shard = shard
        self._device = device
        self._caches = caches
        self._pool = BlockTensors([tensor for layer in caches for tensor in layer], f"layers from {shard.layers.start}")
        self._adapters: dict[str, dict[str, LoraPair]] = {}

    @property
    def progress(self) -> int:
        return self._model.num_layers_begun

    @property
    def maxima(self) -> None:
        return None

    @property
    def row_operators(self) -> RowOperators:
        return ops

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        pairs: dict[str, LoraPair] = {}
        for name, pair in read_adapter(adapter, self._model.config, self._shard, self._device):
            pairs[name] = pair
            yield
        self._adapters[adapter.name] = pairs

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for keys, values in self._caches:
            ops.copy_blocks(keys, values, pairs)

    @property
    def block_layout(self) -> str:
        return self._pool.layout

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self._pool.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], contents: memoryview) -> None:
        self._pool.write(block_ids, contents)

    def close(self) -> None:
        if self._caches:
            del self._model
        self._caches, self._pool, self._adapters = [], BlockTensors([], ""), {}
