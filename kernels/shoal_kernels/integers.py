"""Weight-only integer formats: 8 or 4 bits a weight, scaled for each 32 inputs of an output.

Rounded to the nearest, without calibration data, as llama.cpp's Q8_0 and Q4_1 are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
BITS = (8, 4)


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A matrix as ``values * scales + minimums``, with one scale and one minimum for ``GROUP_SIZE`` inputs.

    Attributes:
        bits: 8 or 4.
        values: int8 [outputs, inputs] of 8 bits; uint8, at most 15, of 4.
        scales: bfloat16 [outputs, inputs / GROUP_SIZE].
        minimums: the same, of 4 bits; 8 bits are symmetric and have none.
    """

    bits: int
    values: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The matrix that it stands for, [outputs, inputs]."""
        groups = self.values.float().view(*self.scales.shape, GROUP_SIZE) * self.scales.float().unsqueeze(-1)
        if self.minimums is not None:
            groups += self.minimums.float().unsqueeze(-1)
        return groups.view(self.values.shape).to(dtype)


def round_weight(weight: Tensor, bits: int) -> IntegerWeight:
    """Round ``weight`` [outputs, inputs] to integers.

    Raises:
        ValueError: bits other than 8 or 4, or inputs that are not a multiple of ``GROUP_SIZE``.
    """
    if bits not in BITS:
        raise ValueError(f"bits: got {bits}; must be 8 or 4")
    outputs, inputs = weight.shape
    if inputs % GROUP_SIZE:
        raise ValueError(f"weight: got {inputs} inputs; must be a multiple of {GROUP_SIZE}")
    groups = weight.float().view(outputs, inputs // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    if bits == 8:
        scales = (torch.maximum(high, -low) / 127).to(torch.bfloat16)
        values = (groups * _inverse(scales)).round_().clamp_(-127, 127).to(torch.int8)
        return IntegerWeight(bits, values.view(outputs, inputs), scales)
    scales, minimums = ((high - low) / 15).to(torch.bfloat16), low.to(torch.bfloat16)
    values = ((groups - minimums.float().unsqueeze(-1)) * _inverse(scales)).round_().clamp_(0, 15).to(torch.uint8)
    return IntegerWeight(bits, values.view(outputs, inputs), scales, minimums)


def _inverse(scales: Tensor) -> Tensor:
    """Of the scale as it is stored; 0 for a group that is all one value."""
    return torch.where(scales == 0, 0.0, 1.0 / scales.float()).unsqueeze(-1)
