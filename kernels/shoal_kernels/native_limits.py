"""What the native CPU decoder supports. Imports no torch, so that this is known before anything is loaded."""

from __future__ import annotations

DTYPES = {"bfloat16": 0, "float32": 1}  # with their numbers in shoal_native.h
PAGE_TOKENS = 16
HEAD_UNIT = 16
MAX_HEAD_SIZE = 256
MAX_GROUP = 96


def refusal(
    *,
    dtype: str,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    expert_size: int = 0,
    shared_size: int = 0,
) -> str | None:
    """The first property of a shape that the decoder does not support, in words; None if it supports the shape."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(DTYPES)}"
    if head_size % HEAD_UNIT or head_size > MAX_HEAD_SIZE:
        return f"a head size of {head_size} is not a multiple of {HEAD_UNIT} up to {MAX_HEAD_SIZE}"
    if block_size % PAGE_TOKENS:
        return f"block_size {block_size} is not a multiple of {PAGE_TOKENS}"
    if num_heads // num_kv_heads > MAX_GROUP:
        return f"{num_heads // num_kv_heads} query heads for a KV head are more than {MAX_GROUP}"
    for name, size in (
        ("hidden", hidden_size),
        ("intermediate", intermediate_size),
        ("experts' intermediate", expert_size),
        ("shared intermediate", shared_size),
    ):
        if size % 2:
            return f"the {name} size {size} is odd"
    return None
