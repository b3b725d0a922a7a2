"""``npu_fused_infer_attention_score``: attention over a paged or a dense cache, for every mixture of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simulated_npu.limits import need

INT32_MAX = 2**31 - 1
MASK_SIZE = 2048
MAX_BATCH = 4096
MAX_HEADS = 256
MAX_GROUP = 64
MAX_HEAD_SIZE = 512
MAX_ROW = 65535
TND_HEAD_SIZES = (128, 192)
SPARSE_MODES = (0, 3, 4)
"""Without a mask; causal, aligned to the last query; a band."""


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **other: Any,
) -> tuple[Tensor, Tensor]:
    unknown = [name for name, given in other.items() if given is not None and given not in (0, False)]
    if unknown or input_layout not in ("TND", "BSND") or block_table is None or softmax_lse_flag:
        raise NotImplementedError(f"the reference covers paged TND and BSND only: {input_layout}, {unknown}")
    num_kv_heads = num_key_value_heads or num_heads
    _check_tensors(query, key, value, num_heads, num_kv_heads, input_layout)
    _check_mask(atten_mask, sparse_mode)
    rows = _split_queries(query, input_layout, actual_seq_lengths)
    _check_pages(key, block_table, block_size, rows, actual_seq_lengths_kv, input_layout)
    assert actual_seq_lengths_kv is not None
    outputs = []
    for index, (q, seq_len) in enumerate(zip(rows, actual_seq_lengths_kv, strict=True)):
        table = block_table[index, : -(-seq_len // block_size)].long()
        keys, values = (cache[table].reshape(-1, num_kv_heads, q.shape[-1])[:seq_len] for cache in (key, value))
        visible = _visible(q.shape[0], seq_len, sparse_mode, pre_tokens, next_tokens, single=input_layout == "BSND")
        outputs.append(_attend(q, keys, values, visible, scale))
    if input_layout == "TND":
        out = torch.cat(outputs)
    else:
        out = torch.zeros_like(query)
        for index, rows_out in enumerate(outputs):
            out[index, : rows_out.shape[0]] = rows_out
    return out.contiguous(), torch.empty(0, dtype=torch.float32)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, num_heads: int, num_kv_heads: int, layout: str) -> None:
    head_size = query.shape[-1]
    need(query.dtype in (torch.float16, torch.bfloat16), f"query is float16 or bfloat16, not {query.dtype}")
    need(query.dtype == key.dtype == value.dtype, "query, key and value have one dtype")
    need(all(t.is_contiguous() for t in (query, key, value)), "query, key and value are contiguous")
    need(query.shape[-2] == num_heads, f"num_heads is {num_heads}, the query has {query.shape[-2]}")
    need(num_heads <= MAX_HEADS, f"at most {MAX_HEADS} heads")
    need(num_heads % num_kv_heads == 0, "num_heads is a multiple of num_key_value_heads")
    need(num_heads // num_kv_heads <= MAX_GROUP, f"at most {MAX_GROUP} query heads for a KV head")
    need(head_size <= MAX_HEAD_SIZE and head_size % 16 == 0, "the head size is a multiple of 16, at most 512")
    need(key.shape == value.shape, "key and value have one shape")
    need(key.numel() <= INT32_MAX, "a cache has at most 2^31 - 1 numbers")
    if layout == "TND":
        need(head_size in TND_HEAD_SIZES, f"TND takes head sizes {TND_HEAD_SIZES}, not {head_size}")
    else:
        need(num_heads * head_size < MAX_ROW, "BSND: heads x head size is below 65535")


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    need(sparse_mode in SPARSE_MODES, f"the reference knows sparse modes {SPARSE_MODES}, not {sparse_mode}")
    if sparse_mode == 0:
        need(mask is None, "sparse mode 0 is used without a mask here")
        return
    need(mask is not None, f"sparse mode {sparse_mode} needs a mask")
    assert mask is not None
    need(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"a mask is bool, int8 or uint8, not {mask.dtype}")
    need(mask.shape[-2:] == (MASK_SIZE, MASK_SIZE), "the mask of modes 2, 3 and 4 is 2048 x 2048")
    corner = mask.reshape(MASK_SIZE, MASK_SIZE)[:8, :8].bool()
    need(torch.equal(corner, torch.ones(8, 8).triu(1).bool()), "the mask is 1 above the diagonal, else 0")


def _split_queries(query: Tensor, layout: str, lengths: Sequence[int] | None) -> list[Tensor]:
    """Each sequence's queries [length, heads, head size]."""
    if layout == "BSND":
        if query.shape[1] == 1:
            return [q[:1] for q in query]
        wanted = [query.shape[1]] * len(query) if lengths is None else list(lengths)
        need(len(wanted) == len(query), "one query length for each sequence")
        need(max(wanted) <= query.shape[1], "no query length beyond S")
        return [q[:n] for q, n in zip(query, wanted, strict=True)]
    need(lengths is not None, "TND needs actual_seq_lengths")
    assert lengths is not None
    starts = [0, *lengths[:-1]]
    need(all(a <= b for a, b in zip(starts, lengths, strict=True)), "TND: actual_seq_lengths add up as they go")
    need(lengths[-1] == query.shape[0], f"TND: actual_seq_lengths ends at {lengths[-1]}, T is {query.shape[0]}")
    need(len(lengths) <= MAX_BATCH, f"TND: at most {MAX_BATCH} sequences")
    return [query[a:b] for a, b in zip(starts, lengths, strict=True)]


def _check_pages(
    cache: Tensor, table: Tensor, block_size: int, rows: list[Tensor], seq_lens: Sequence[int] | None, layout: str
) -> None:
    need(seq_lens is not None, "a block table needs actual_seq_lengths_kv")
    assert seq_lens is not None
    need(
        table.dtype == torch.int32 and table.dim() == 2,
        f"the block table is int32 with 2 dimensions, not {table.dtype}",
    )
    need(len(table) == len(rows), f"the block table has {len(table)} rows for {len(rows)} sequences")
    need(len(seq_lens) == len(rows), f"actual_seq_lengths_kv has {len(seq_lens)} entries for {len(rows)} sequences")
    need(cache.dim() == 3, "a cache of 4 dimensions would be read as [blocks, KV heads, block size, head size]")
    need(cache.shape[1] == block_size, f"block_size is {block_size}, the cache has blocks of {cache.shape[1]}")
    need(cache.shape[2] <= MAX_ROW, "KV heads x head size is at most 65535")
    if all(len(q) == 1 for q in rows):
        need(0 < block_size <= 512 and block_size % 16 == 0, f"decode: blocks of 16 to 512 by 16, not {block_size}")
    else:
        need(0 < block_size <= 512 and block_size % 128 == 0, f"blocks of 128 to 512 by 128, not {block_size}")
    num_blocks = [-(-n // block_size) for n in seq_lens]
    need(max(num_blocks) <= table.shape[1], "the block table has a column for each block of a sequence")
    need(sum(num_blocks) <= cache.shape[0], "the cache has as many blocks as the sequences' counts add up to")
    need(all(n >= len(q) for n, q in zip(seq_lens, rows, strict=True)), "a sequence has no more queries than keys")
    used = [row[:n] for row, n in zip(table, num_blocks, strict=True)]
    need(
        all(bool(((ids >= 0) & (ids < len(cache))).all()) for ids in used), "the block table names blocks of the cache"
    )


def _visible(num_queries: int, seq_len: int, mode: int, before: int, after: int, *, single: bool) -> Tensor | None:
    """bool [num_queries, seq_len]: which keys a query sees; None for all."""
    if mode == 0 or (single and num_queries == 1 and mode == 3):
        return None
    positions = torch.arange(seq_len - num_queries, seq_len)[:, None]
    keys = torch.arange(seq_len)
    if mode == 3:
        return keys <= positions
    return (keys >= positions - before) & (keys <= positions + after)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """q [t, H, D] over keys and values [s, Hkv, D] → [t, H, D] in q's dtype."""
    wide = (t.float().transpose(0, 1)[None] for t in (q, keys, values))
    out = functional.scaled_dot_product_attention(*wide, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).to(q.dtype)


def into_out(
    query: Tensor, key: Tensor, value: Tensor, *, out: list[Tensor], workspace: Any = None, **rest: Any
) -> Any:
    """The ``.out`` overload, which graphs use: it also needs the workspace that was requested for the call."""
    need(workspace is not None and workspace.numel() > 0, "a captured call has its workspace")
    results = fused_infer_attention_score(query, key, value, **rest)
    out[0].copy_(results[0])
    return out


def workspace(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros(4096, dtype=torch.uint8)


REFERENCES = {
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score.out": into_out,
    "_npu_fused_infer_attention_score_get_max_workspace": workspace,
}
