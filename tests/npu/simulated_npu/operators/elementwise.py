"""Norms, activation and rotary positions.

The documentation does not say where these round. Here they round as transformers does on a CPU, so that a model's
tokens on the simulated device can be compared with the CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from simulated_npu.limits import need

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    need(x.dtype in FLOATS, f"x is float16, bfloat16 or float32, not {x.dtype}")
    need(gamma.dtype in (x.dtype, torch.float32), "gamma has the dtype of x or float32")
    need(gamma.shape == x.shape[x.dim() - gamma.dim() :], "gamma has the last dimensions of x")
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    scale = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (gamma * (x.float() * scale).to(x.dtype)).to(x.dtype), scale


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    need(x1.dtype == x2.dtype == gamma.dtype, "x1, x2 and gamma have one dtype")
    need(x1.shape == x2.shape, "x1 and x2 have one shape")
    total = x1 + x2
    normed, scale = rms_norm(total, gamma, epsilon)
    return normed, scale, total


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    need(x.dtype in FLOATS, f"x is float16, bfloat16 or float32, not {x.dtype}")
    need(x.is_contiguous(), "x is contiguous")
    need(x.shape[dim] % 2 == 0, "the split dimension is even")
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    if rotary_mode != "half" or cache_mode != "default" or any(mrope_section or ()) or positions.dim() != 1:
        raise NotImplementedError("the reference covers plain rotary positions in halves")
    need(positions.dtype in (torch.int32, torch.int64), f"positions are int32 or int64, not {positions.dtype}")
    need(query.dim() == key.dim() == cos_sin_cache.dim() == 2, "query, key and the cache have 2 dimensions")
    need(query.dtype == key.dtype == cos_sin_cache.dtype, "query, key and the cache have one dtype")
    rotary_size = cos_sin_cache.shape[1]
    multiple = 16 if query.dtype == torch.float32 else 32
    need(
        rotary_size % multiple == 0, f"the rotary size is a multiple of {multiple} for {query.dtype}, not {rotary_size}"
    )
    need(rotary_size <= head_size, "the rotary size is at most the head size")
    need(positions.numel() == 0 or int(positions.max()) < len(cos_sin_cache), "no position is beyond the cache")
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], -1, head_size)
        turned, rest = heads[..., :rotary_size], heads[..., rotary_size:]
        first, second = turned.chunk(2, dim=-1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return out.reshape(x.shape)

    return rotate(query), rotate(key)


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError("the reference covers plain halves")
    need(x.dim() == r1.dim() == r2.dim() == 4, "x, cosines and sines have 4 dimensions")
    need(x.shape[-1] < 896 and x.shape[-1] % 2 == 0, "the head size is even and below 896")
    need(x.shape[0] < 1000 and x.shape[2] < 1000, "BSND: B and N are below 1000")
    need(r1.shape[-1] == r2.shape[-1] == x.shape[-1], "cosines and sines are as wide as a head")
    first, second = x.chunk(2, dim=-1)
    return r1 * x + r2 * torch.cat((-second, first), dim=-1)


REFERENCES = {
    "npu_add_rms_norm": add_rms_norm,
    "npu_mrope": mrope,
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
}
