"""The operators of a decoder, by name. Each dispatches to the backend of its tensors' device.

T is the number of tokens of a step, D the head size, H a number of heads. A *cache* is one layer's keys or values, in
the backend's ``cache_shape``; a block of all heads is one contiguous piece to copy or to send. On the CPU it is
``[num_blocks, num_kv_heads, block_size, D]``: the tokens of one block and head are contiguous, so that attention for a
head streams whole tiles of ``block_size × D`` values (1 KiB to 4 KiB and aligned to cache lines for D of 32 and up),
once for all query heads of the group.

Rounding follows transformers: norms compute in float32 and round before multiplying by the weight; rotary embedding
runs in the model's dtype; softmax is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import cast

from torch import Tensor

from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.metadata import AttentionMetadata

BACKENDS = {"cpu": "shoal_kernels.cpu", "npu": "shoal_kernels.npu"}


@cache
def backend(device_type: str) -> ModuleType:
    """The module with these operators for a torch device type. Raises NotImplementedError if there is none."""
    if device_type not in BACKENDS:
        raise NotImplementedError(f"no kernels for device {device_type!r}; there are {', '.join(BACKENDS)}")
    return import_module(BACKENDS[device_type])


def cache_shape(
    device_type: str, num_blocks: int, num_kv_heads: int, block_size: int, head_size: int
) -> tuple[int, ...]:
    """The shape of one layer's keys, or values; the first dimension is the block."""
    shape = backend(device_type).cache_shape(num_blocks, num_kv_heads, block_size, head_size)
    return cast(tuple[int, ...], shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, in], weight [out, in], bias [out] → [T, out]."""
    return cast(Tensor, backend(x.device.type).linear(x, weight, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square (Zhang and Sennrich 2019), times weight: x [..., N], weight [N].

    On CPUs the weight may be float32 whatever the dtype of x; rounding then comes after it.
    """
    return cast(Tensor, backend(x.device.type).rms_norm(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``, both [T, N]. The backend may overwrite ``residual``."""
    return cast(tuple[Tensor, Tensor], backend(x.device.type).add_rms_norm(x, residual, weight, eps))


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs ``(i, i + D/2)`` of each head by the angle of its position (Su et al. 2021, Llama's halves).

    Args:
        positions: integers [T].
        q, k: [T, Hq, D] and [T, Hkv, D].
        cos_sin_cache: [max_positions, D] in the dtype of q: D/2 cosines, then D/2 sines.

    Returns:
        The rotated q and k, of the same shapes.
    """
    return cast(tuple[Tensor, Tensor], backend(q.device.type).rotary_embedding(positions, q, k, cos_sin_cache))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2I], gate first → [T, I]."""
    return cast(Tensor, backend(gate_up.device.type).silu_and_mul(gate_up))


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of [T, 2I], gate first → [T, I], by the tanh approximation (Hendrycks and Gimpel 2016)."""
    return cast(Tensor, backend(gate_up.device.type).gelu_tanh_and_mul(gate_up))


def select_experts(
    router_logits: Tensor,
    num_chosen: int,
    renormalize: bool,
    scores: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token, by float32 scores.

    Args:
        router_logits: [T, num_experts].
        renormalize: divide the chosen weights, which are scores, by their sum.
        scores: "softmax" over all experts, or "sigmoid" of each.
        bias: float32 [num_experts], added to sigmoid scores for the choice alone (DeepSeek-V3, arXiv 2412.19437).
        scale: of the weights, at last.

    Returns:
        weights [T, num_chosen] in the logits' dtype, and expert ids, integers [T, num_chosen].
    """
    module = backend(router_logits.device.type)
    chosen = module.select_experts(router_logits, num_chosen, renormalize, scores, bias, scale)
    return cast(tuple[Tensor, Tensor], chosen)


def apply_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor, first_expert: int
) -> Tensor:
    """For each token, the weighted sum of its chosen experts' gated MLPs, counting only the experts held here.

    Args:
        x: [T, H].
        gate_up: [E, 2I, H], gate rows first, of experts ``first_expert`` to ``first_expert + E - 1``.
        down: [E, H, I].
        weights, expert_ids: [T, k], see ``select_experts``; ids outside the held experts add nothing.

    Returns:
        [T, H].
    """
    module = backend(x.device.type)
    return cast(Tensor, module.apply_experts(x, gate_up, down, weights, expert_ids, first_expert))


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [T, Hkv, D] in the caches at slots [T] (integers, distinct)."""
    backend(k.device.type).write_kv(k, v, key_cache, value_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of this step's queries over their sequences' cached KV (Kwon et al. 2023), after ``write_kv``.

    Args:
        q: [T, Hq, D]; Hq is a multiple of Hkv, and query head h reads KV head ``h // (Hq / Hkv)``.
        key_cache, value_cache: of ``cache_shape``.
        scale: factor of the scores, usually D ** -0.5.
        sliding_window: how many tokens, itself included, a query sees; None for all.

    Returns:
        [T, Hq, D].
    """
    return cast(
        Tensor, backend(q.device.type).paged_attention(q, key_cache, value_cache, metadata, scale, sliding_window)
    )


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) within one layer's caches; all sources are read before anything is written."""
    backend(key_cache.device.type).copy_blocks(key_cache, value_cache, pairs)


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its first index: float32 [T, N], N ≥ 1 → [T], int64 [T].

    A row with NaN gives NaN and the index of its first NaN.
    """
    return cast(tuple[Tensor, Tensor], backend(x.device.type).row_maxima(x))


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """Draw a token from each of some rows: float32 [T, vocab_size], n row numbers (at least one) and n draws → n token
    ids.

    A row has no NaN and no infinity but -inf, and not only that. What it draws does not depend on the other rows.
    """
    return cast(list[int], backend(logits.device.type).draw(logits, rows, draws))


def log_probabilities(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[LogProbabilities]:
    """For each of some rows the log-probability of one token, and the likeliest tokens with theirs: float32
    [T, vocab_size], n row numbers (at least one), n token ids and n counts. A row of few tokens has fewer than its
    count.
    """
    found = backend(logits.device.type).log_probabilities(logits, rows, token_ids, counts)
    return cast(list[LogProbabilities], found)


def keep_top(logits: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Set logits to -inf outside each row's top k, then outside the smallest set that reaches probability top-p
    (Holtzman et al. 2020).

    All tokens as likely as the k-th stay.

    Args:
        logits: float32 [n, vocab_size].
        top_ks: n numbers; 0 keeps all.
        top_ps: n numbers in (0, 1]; 1 keeps all.

    Returns:
        [n, vocab_size].
    """
    return cast(Tensor, backend(logits.device.type).keep_top(logits, top_ks, top_ps))
