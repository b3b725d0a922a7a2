"""The operators of a mixture of experts: gate, sort by expert, one product per expert, restore the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simulated_npu.limits import need


def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    need(x.dim() == 2 and 1 <= k <= x.shape[1], "k is 1 to the number of experts")
    weights, experts = x.float().softmax(-1).topk(k, dim=-1)
    num_tokens = x.shape[0]
    rows = torch.arange(num_tokens * k, dtype=torch.int32).view(k, num_tokens).T.contiguous()
    return weights.to(x.dtype), experts.int(), rows


def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **other: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if quant_mode != -1 or row_idx_type != 0 or not expert_tokens_num_flag or expert_tokens_num_type != 1:
        raise NotImplementedError("the reference covers unquantised rows and counts per expert")
    first, last = active_expert_range or (0, expert_num)
    need(expert_idx.dtype == torch.int32 and expert_idx.dim() == 2, "expert_idx is int32 [tokens, k]")
    need(0 <= first < last <= expert_num, "active_expert_range lies within the experts")
    num_rows = expert_idx.numel()
    need(active_num in (-1, 0, num_rows), "every row stays: active_num is tokens x k")
    flat = expert_idx.reshape(-1).long()
    # Rows of other ranks' experts come last, and their places are -1.
    local = (flat >= first) & (flat < last)
    order = torch.argsort(torch.where(local, flat, expert_num), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(num_rows)
    places = torch.where(local, places, -1)
    counts = torch.bincount(flat[local] - first, minlength=last - first)
    rows = x[order // expert_idx.shape[1]]
    rows[int(local.sum()) :] = torch.nan  # rows that are not written
    return rows, places.int(), counts.long(), torch.zeros(num_rows)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **other: Any,
) -> list[Tensor]:
    if any(v is not None and v != 0 for v in other.values()) or split_item != 2 or group_type != 0:
        raise NotImplementedError("the reference covers one x, one weight, split along rows")
    need(
        len(x) == len(weight) == 1 and x[0].dim() == 2 and weight[0].dim() == 3,
        "x [rows, in], weight [experts, in, out]",
    )
    need(x[0].dtype == weight[0].dtype, "x and weight have one dtype")
    need(x[0].shape[1] == weight[0].shape[1], "x and weight agree on the inner size")
    need(group_list is not None and group_list.dtype == torch.int64, "group_list is int64")
    assert group_list is not None
    counts = group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    need(len(counts) == len(weight[0]) and int(counts.sum()) <= len(x[0]), "a group for each expert, within the rows")
    out = x[0].new_full((len(x[0]), weight[0].shape[2]), torch.nan)  # rows in no group are not written
    start = 0
    for expert, count in enumerate(counts.tolist()):
        out[start : start + count] = x[0][start : start + count] @ weight[0][expert]
        start += count
    return [out]


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    need(sorted_indices.dtype == torch.int32, "sorted_indices is int32")
    need(permuted_tokens.shape[0] == sorted_indices.numel(), "a row of permuted_tokens for each of sorted_indices")
    need(bool((sorted_indices >= 0).all()), "sorted_indices are not negative")
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    rows = rows.view(*probs.shape, -1)
    return (rows.float() * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


def moe_token_unpermute_for_training(permuted_tokens: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """What the operator above calls where gradients are enabled; the second result is for the backward pass."""
    return moe_token_unpermute(permuted_tokens, *arguments), permuted_tokens


REFERENCES = {
    "_npu_moe_token_unpermute": moe_token_unpermute_for_training,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu_moe_token_unpermute": moe_token_unpermute,
}
