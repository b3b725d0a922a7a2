"""Writing keys and values to pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulated_npu.limits import need


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **other: Any,
) -> None:
    if cache_mode not in (None, "Norm") or any(v is not None for v in other.values()):
        raise NotImplementedError("the reference covers cache_mode 'Norm' without compression")
    tensors = (key, value, key_cache, value_cache)
    need(all(t.is_contiguous() for t in (*tensors, slot_mapping)), "every tensor is contiguous")
    need(len({t.dtype for t in tensors}) == 1, "keys, values and caches have one dtype")
    need(slot_mapping.dtype in (torch.int32, torch.int64), f"slots are int32 or int64, not {slot_mapping.dtype}")
    need(key.dim() == 3 and key.shape[:2] == value.shape[:2], "key and value are [tokens, heads, head size]")
    need(key_cache.dim() == 4, "caches are [blocks, block size, heads, head size]")
    need(
        key_cache.shape[2:] == key.shape[1:] and value_cache.shape[2:] == value.shape[1:], "heads and head sizes agree"
    )
    need(slot_mapping.shape == key.shape[:1], "one slot for each token")
    slots = slot_mapping.long()
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    need(bool(((slots >= 0) & (slots < num_slots)).all()), f"slots are 0 to {num_slots - 1}")
    need(slots.unique().numel() == slots.numel(), "no slot is written twice")
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


REFERENCES = {"npu_scatter_pa_kv_cache": scatter_pa_kv_cache}
