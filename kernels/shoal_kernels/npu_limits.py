"""What the NPU operators support, by the documentation in torch_npu 2.10 to 2.13, and which ones are installed.

Does not import torch_npu, so that a shape can be refused before a device is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE = 128
INT32_MAX = 2**31 - 1
PACKED_HEAD_SIZES = (128, 192)
MAX_BATCH = 4096
MAX_HEADS = 256
MAX_GROUP = 64
MAX_HEAD_SIZE = 512
MAX_ROW = 65535  # values of one token's keys; in the padded layout also of its queries
ROTARY_MULTIPLE = 32
MAX_TOP_K = 1024

# The operators that every model needs, and the arguments passed to them.
REQUIRED: dict[str, tuple[str, ...]] = {
    "npu_fused_infer_attention_score": (
        "query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table",
        "num_heads", "scale", "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode",
        "block_size",
    ),
    "npu_scatter_pa_kv_cache": ("key", "value", "key_cache", "value_cache", "slot_mapping", "cache_mode"),
    "npu_rms_norm": ("epsilon",),
    "npu_add_rms_norm": ("epsilon",),
    "npu_swiglu": ("dim",),
    "npu_rotary_mul": (),
    "npu_top_k_top_p": ("p", "k"),
}  # fmt: skip
EXPERTS: dict[str, tuple[str, ...]] = {
    "npu_moe_gating_top_k_softmax": ("k",),
    "npu_moe_init_routing_v2": (
        "active_num", "expert_num", "expert_tokens_num_type", "expert_tokens_num_flag", "active_expert_range",
        "quant_mode",
    ),
    "npu_grouped_matmul": ("split_item", "group_type", "group_list", "group_list_type"),
    "npu_moe_token_unpermute": ("probs",),
}  # fmt: skip

INT8: dict[str, tuple[str, ...]] = {
    "npu_dynamic_quant": (),
    "npu_quant_matmul": ("pertoken_scale", "output_dtype"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention shape of a rank. ``num_blocks`` is that of one layer's cache."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    num_blocks: int
    sliding_window: int | None


def refusal(shape: AttentionShape) -> str | None:
    """Why an NPU cannot run this shape: the field, its value and the limit. None if it can."""
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype: got {str(shape.dtype).removeprefix('torch.')!r}; NPU attention takes bfloat16"
    if shape.block_size != BLOCK_SIZE:
        return f"block_size: got {shape.block_size}; must be {BLOCK_SIZE} on an NPU"
    head_size, packed = shape.head_size, shape.head_size in PACKED_HEAD_SIZES
    if head_size % 16 or head_size > MAX_HEAD_SIZE:
        return f"model: head size {head_size}; NPU attention takes multiples of 16 up to {MAX_HEAD_SIZE}"
    if shape.sliding_window is not None and not packed:
        return f"model: sliding window with head size {head_size}; an NPU has it for head sizes {PACKED_HEAD_SIZES}"
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads > MAX_HEADS or heads > MAX_GROUP * kv_heads:
        return (
            f"model: {heads} heads over {kv_heads} KV heads; an NPU takes up to {MAX_HEADS} heads, "
            f"{MAX_GROUP} for a KV head"
        )
    if kv_heads * head_size > MAX_ROW or (not packed and heads * head_size >= MAX_ROW):
        return f"model: {heads} heads of size {head_size} over {kv_heads} KV heads are too wide for one NPU"
    block = shape.block_size * kv_heads * head_size
    if shape.num_blocks * block > INT32_MAX:
        return f"num_blocks: got {shape.num_blocks}; an NPU addresses {INT32_MAX // block} of this shape"
    return None


def max_num_blocks(num_kv_heads: int, head_size: int) -> int:
    """The largest number of blocks of one layer's cache."""
    return INT32_MAX // (BLOCK_SIZE * num_kv_heads * head_size)


def missing_operators(namespace: Any, required: dict[str, tuple[str, ...]]) -> list[str]:
    """The operators in ``required``, or arguments of them, that ``namespace`` (``torch.ops.npu``) lacks."""
    missing = []
    for name, wanted in required.items():
        packet = getattr(namespace, name, None)
        if packet is None:
            missing.append(name)
        else:
            has = {argument.name for argument in packet.default._schema.arguments}
            missing += [f"{name}({argument}=)" for argument in wanted if argument not in has]
    return missing
