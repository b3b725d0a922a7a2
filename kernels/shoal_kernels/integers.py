"""Integer formats of weights: 8 or 4 bits per weight, with a scale for every 32 inputs of an output.

Weights are rounded to the nearest, without calibration data, as in llama.cpp's Q8_0 and Q4_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
BITS = (8, 4)
PIECE = 1 << 24  # values that are rounded at a time: a layer's experts together may have a hundred times as many


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A matrix as ``values * scales + minimums``, with one scale and one minimum per ``GROUP_SIZE`` inputs.

    Attributes:
        bits: 8 or 4.
        values: [outputs, inputs]; int8 for 8 bits, uint8 of at most 15 for 4 bits.
        scales: bfloat16 [outputs, inputs / GROUP_SIZE].
        minimums: like ``scales``, for 4 bits; 8 bits are symmetric and have none.
        activation_bits: of the integers that native kernels round its left-hand sides to, with a scale for every
            ``GROUP_SIZE`` values of a row: 16, almost without loss, or 8. Other operators round nothing.
    """

    bits: int
    values: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    activation_bits: int = 16

    def check(self) -> None:
        """Raises ValueError: the dtype or shape of a part is not as above."""
        groups = (*self.values.shape[:-1], self.values.shape[-1] // GROUP_SIZE)
        parts = {"scales": self.scales, **({} if self.minimums is None else {"minimums": self.minimums})}
        for name, part in parts.items():
            if part.dtype != torch.bfloat16 or part.shape != groups:
                raise ValueError(f"{name}: got {part.dtype} {tuple(part.shape)}; must be torch.bfloat16 {groups}")
        if self.values.dtype != (kind := torch.int8 if self.bits == 8 else torch.uint8):
            raise ValueError(f"values: got {self.values.dtype}; must be {kind} for {self.bits} bits")

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The matrix that it represents, [outputs, inputs]."""
        groups = self.values.float().view(*self.scales.shape, GROUP_SIZE) * self.scales.float().unsqueeze(-1)
        if self.minimums is not None:
            groups += self.minimums.float().unsqueeze(-1)
        return groups.view(self.values.shape).to(dtype)


def round_weight(weight: Tensor, bits: int) -> IntegerWeight:
    """Round ``weight`` [outputs, inputs] to integers.

    Raises:
        ValueError: ``bits`` is neither 8 nor 4, or the number of inputs is not a multiple of ``GROUP_SIZE``.
    """
    if bits not in BITS:
        raise ValueError(f"bits: got {bits}; must be 8 or 4")
    outputs, inputs = weight.shape
    if inputs % GROUP_SIZE:
        raise ValueError(f"weight: got {inputs} inputs; must be a multiple of {GROUP_SIZE}")
    rows = max(1, PIECE // inputs)
    if outputs > rows:
        return joined([round_weight(piece, bits) for piece in torch.split(weight, rows)])
    groups = weight.float().view(outputs, inputs // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    if bits == 8:
        scales = (torch.maximum(high, -low) / 127).to(torch.bfloat16)
        values = (groups * _inverse(scales)).round_().clamp_(-127, 127).to(torch.int8)
        return IntegerWeight(bits, values.view(outputs, inputs), scales)
    scales, minimums = ((high - low) / 15).to(torch.bfloat16), low.to(torch.bfloat16)
    values = ((groups - minimums.float().unsqueeze(-1)) * _inverse(scales)).round_().clamp_(0, 15).to(torch.uint8)
    return IntegerWeight(bits, values.view(outputs, inputs), scales, minimums)


def joined(pieces: Sequence[IntegerWeight]) -> IntegerWeight:
    """Pieces of the same bits on top of each other."""
    if len(pieces) == 1:
        return pieces[0]
    minimums = [piece.minimums for piece in pieces if piece.minimums is not None]
    return IntegerWeight(
        pieces[0].bits,
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.scales for piece in pieces]),
        torch.cat(minimums) if minimums else None,
    )


def _inverse(scales: Tensor) -> Tensor:
    """The inverse of the scale as stored; 0 for a scale of 0, as of a group whose values are all the same."""
    return torch.where(scales == 0, 0.0, 1.0 / scales.float()).unsqueeze(-1)
