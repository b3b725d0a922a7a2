"""Int8 matrix products on an NPU's cube unit: weights are scaled per output channel, activations per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch_npu
from torch import Tensor

LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``weight[o, i] ≈ values[i, o] * scale[o]``: values int8 [in, out], scale float32 [out]."""

    values: Tensor
    scale: Tensor

    def to(self, device: torch.device) -> Int8Weight:
        return Int8Weight(self.values.to(device), self.scale.to(device))


def round_weight(weight: Tensor) -> Int8Weight:
    """Round ``weight`` [out, in], scaling each output channel by its largest absolute value."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / LARGEST
    values = (wide / torch.where(scale == 0, 1.0, scale).unsqueeze(1)).round().clamp(-LARGEST, LARGEST)
    return Int8Weight(values.to(torch.int8).T.contiguous(), scale)


def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with x [T, in] quantized row by row → [T, out] in the dtype of x."""
    values, scale = torch_npu.npu_dynamic_quant(x)
    out = torch_npu.npu_quant_matmul(values, weight.values, weight.scale, pertoken_scale=scale, output_dtype=x.dtype)
    return cast(Tensor, out if bias is None else out + bias)
