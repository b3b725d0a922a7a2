"""The contents of KV blocks that lie in torch's tensors, as bytes that another replica can take over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockTensors:
    """Keys and values of each layer, [num_blocks, ...], all of one shape, dtype and device. ``layers`` tells layouts of
    equal shapes apart.
    """

    def __init__(self, tensors: Sequence[Tensor], layers: str) -> None:
        self.tensors = tensors
        self._layers = layers

    @property
    def layout(self) -> str:
        first = self.tensors[0]
        sizes = " x ".join(map(str, (len(self.tensors), *first.shape[1:])))
        return f"torch {first.device.type} {str(first.dtype).removeprefix('torch.')}, {self._layers}, {sizes}"

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """The contents of blocks, tensor by tensor."""
        ids = self._ids(block_ids)
        contents = torch.stack([tensor.index_select(0, ids) for tensor in self.tensors]).cpu()
        return contents.view(torch.uint8).numpy().reshape(-1).data

    def write(self, block_ids: Sequence[int], contents: memoryview) -> None:
        """Fill blocks with what ``read`` has returned for as many. Raises ValueError if it is more or less."""
        first, ids = self.tensors[0], self._ids(block_ids)
        shape = (len(self.tensors), len(ids), *first.shape[1:])
        num_bytes = torch.Size(shape).numel() * first.element_size()
        if contents.nbytes != num_bytes:
            raise ValueError(f"got {contents.nbytes} bytes; must be {num_bytes}")
        held = torch.frombuffer(bytearray(contents), dtype=first.dtype).view(shape).to(first.device)
        for tensor, part in zip(self.tensors, held, strict=True):
            tensor.index_copy_(0, ids, part)

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self.tensors[0].device)
