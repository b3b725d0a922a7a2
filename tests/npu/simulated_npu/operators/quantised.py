"""Quantisation to int8, and products of int8 matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulated_npu.limits import need

# A dtype reaches the operator as its number in torch.
DTYPES = {5: torch.float16, 15: torch.bfloat16}


def dynamic_quant(x: Tensor, **other: Any) -> tuple[Tensor, Tensor]:
    need(x.dtype in (torch.float16, torch.bfloat16), f"x is float16 or bfloat16, not {x.dtype}")
    scale = x.float().abs().amax(-1) / 127
    safe = torch.where(scale == 0, 1.0, scale)
    return torch.round(x.float() / safe[..., None]).clamp(-128, 127).to(torch.int8), scale


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
    **other: Any,
) -> Tensor:
    need(x1.dtype == x2.dtype == torch.int8, "both factors are int8")
    need(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], "x1 [rows, in], x2 [in, out]")
    need(scale.dtype in (torch.float32, torch.bfloat16) and scale.shape == (x2.shape[1],), "a scale for each column")
    need(pertoken_scale is None or pertoken_scale.dtype == torch.float32, "pertoken_scale is float32")
    need(pertoken_scale is None or pertoken_scale.shape == (x1.shape[0],), "a pertoken_scale for each row")
    dtype = output_dtype if isinstance(output_dtype, torch.dtype) else DTYPES.get(output_dtype)
    need(dtype in (torch.float16, torch.bfloat16), f"the output is float16 or bfloat16, not {output_dtype}")
    out = (x1.int() @ x2.int()).float() * scale.float()
    if pertoken_scale is not None:
        out = out * pertoken_scale[:, None]
    return (out if bias is None else out + bias.float()).to(dtype)


REFERENCES = {"npu_dynamic_quant": dynamic_quant, "npu_quant_matmul": quant_matmul}
