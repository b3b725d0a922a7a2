"""The operators for Ascend NPUs, using torch_npu. Signatures and meaning are those of ``ops``.

Written against torch_npu 2.10 to 2.13. A cache is ``[num_blocks, block_size, Hkv, D]``, the only plain layout that both
the write and the attention operator take. Attention is one operator for prefill, chunk, prefix hit and decode alike:
in packed layout (TND) for the head sizes for which packing is documented, else in padded layout (BSND), which takes
every head size that ``refusal`` accepts. Lengths are host integers throughout; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from shoal_kernels import npu_int8, sampling
from shoal_kernels.cpu import choose_by_sigmoid
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.npu_int8 import Int8Weight
from shoal_kernels.npu_limits import INT32_MAX, MAX_BATCH, MAX_TOP_K, PACKED_HEAD_SIZES, ROTARY_MULTIPLE

MASK_SIZE = 2048  # of the one mask that is used for every length
CAUSAL, BAND = 3, 4  # sparse modes, aligned to the last query
COUNTS = 1  # groups are given by their sizes, not by their ends


def cache_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, ...]:
    return (num_blocks, block_size, num_kv_heads, head_size)


def linear(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Int8Weight):
        return npu_int8.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return cast(Tensor, torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0])


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
    return normed, total


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, head_size = q.shape[0], q.shape[-1]
    if head_size % ROTARY_MULTIPLE == 0 and hasattr(torch_npu, "npu_mrope"):
        flat_q, flat_k = q.reshape(num_tokens, -1), k.reshape(num_tokens, -1)
        turned = torch_npu.npu_mrope(
            positions, flat_q, flat_k, cos_sin_cache, head_size, mrope_section=[0, 0, 0], rotary_mode="half"
        )
        return turned[0].view(q.shape), turned[1].view(k.shape)
    # BSND with one sequence of T tokens; the cosines of half a head serve both halves.
    cos, sin = cos_sin_cache.index_select(0, positions).view(1, num_tokens, 1, 2, -1).unbind(3)
    cos, sin = cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2)
    rotated = (torch_npu.npu_rotary_mul(x.contiguous().unsqueeze(0), cos, sin)[0] for x in (q, k))
    return next(rotated), next(rotated)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return cast(Tensor, torch_npu.npu_swiglu(gate_up, dim=-1))


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    torch_npu.npu_scatter_pa_kv_cache(
        k.contiguous(), v.contiguous(), key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    attend = _attend_packed if q.shape[-1] in PACKED_HEAD_SIZES else _attend_padded
    parts = _parts(metadata.seq_lens, *key_cache.shape[:2])
    if len(parts) == 1:
        return attend(q, key_cache, value_cache, metadata, scale, sliding_window)
    starts = metadata.query_start_loc
    outputs = [
        attend(
            q[starts[a] : starts[b]],
            key_cache,
            value_cache,
            AttentionMetadata(
                query_start_loc=[start - starts[a] for start in starts[a : b + 1]],
                seq_lens=metadata.seq_lens[a:b],
                block_tables=metadata.block_tables[a:b],
                slot_mapping=metadata.slot_mapping[starts[a] : starts[b]],
            ),
            scale,
            sliding_window,
        )
        for a, b in parts
    ]
    return torch.cat(outputs)


def _parts(seq_lens: Sequence[int], num_blocks: int, block_size: int) -> list[tuple[int, int]]:
    """Ranges of sequences for one call each: their block counts must add up to no more than the cache has.

    There is more than one range only if sequences share so many blocks that the sum exceeds the cache, or if there are
    more than MAX_BATCH sequences.
    """
    parts, start, total = [], 0, 0
    for index, seq_len in enumerate(seq_lens):
        wanted = -(-seq_len // block_size)
        if total + wanted > num_blocks or index - start == MAX_BATCH:
            parts.append((start, index))
            start, total = index, 0
        total += wanted
    return [*parts, (start, len(seq_lens))]


def _attend_packed(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float, sliding_window: int | None
) -> Tensor:
    """All sequences in one call: q [T, Hq, D]."""
    lengths = list(metadata.query_start_loc[1:])
    return _attention(
        q, keys, values, metadata.block_tables, lengths, list(metadata.seq_lens), scale, sliding_window, "TND"
    )


def _attend_padded(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float, sliding_window: int | None
) -> Tensor:
    """One call per run of sequences of the same query length, so that nothing is padded: q [n, length, Hq, D]."""
    lengths, starts, tables = metadata.query_lens, metadata.query_start_loc, metadata.block_tables
    outputs, first = [], 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths) and lengths[end] == lengths[first]:
            continue
        length, num_seqs = lengths[first], end - first
        block = q[starts[first] : starts[end]].view(num_seqs, length, *q.shape[1:])
        seq_lens = list(metadata.seq_lens[first:end])
        out = _attention(
            block, keys, values, tables[first:end], [length] * num_seqs, seq_lens, scale, sliding_window, "BSND"
        )
        outputs.append(out.view(-1, *q.shape[1:]))
        first = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    scale: float,
    sliding_window: int | None,
    layout: str,
) -> Tensor:
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    result = torch_npu.npu_fused_infer_attention_score(
        query=q.contiguous(),
        # With four dimensions, it would be read as [blocks, heads, block size, head size].
        key=keys.view(num_blocks, block_size, -1),
        value=values.view(num_blocks, block_size, -1),
        atten_mask=causal_mask(q.device),
        block_table=block_tables,
        actual_seq_lengths=query_lens,
        actual_seq_lengths_kv=seq_lens,
        num_heads=q.shape[-2],
        num_key_value_heads=num_kv_heads,
        scale=scale,
        # A band counts the tokens before a query; a sliding window includes the query.
        pre_tokens=INT32_MAX if sliding_window is None else sliding_window - 1,
        next_tokens=INT32_MAX if sliding_window is None else 0,
        sparse_mode=CAUSAL if sliding_window is None else BAND,
        input_layout=layout,
        block_size=block_size,
    )
    return cast(Tensor, result[0])


@cache
def causal_mask(device: torch.device) -> Tensor:
    """int8 [2048, 2048], 1 above the diagonal, as modes 3 and 4 take it for all lengths. Made once per device."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu(1).to(device)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    sources, destinations = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(key_cache.device)
    for blocks in (key_cache, value_cache):
        blocks.index_copy_(0, destinations, blocks.index_select(0, sources))


def select_experts(
    router_logits: Tensor, num_chosen: int, renormalize: bool, scores: str, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if scores == "softmax":
        weights, expert_ids, _ = torch_npu.npu_moe_gating_top_k_softmax(router_logits.float(), k=num_chosen)
    else:
        weights, expert_ids = choose_by_sigmoid(router_logits, num_chosen, bias)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights * scale).to(router_logits.dtype), expert_ids


def apply_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor, first_expert: int
) -> Tensor:
    num_experts = len(gate_up)
    # Map the experts of other ranks to one extra expert: its rows come last and are in no group.
    local = expert_ids - first_expert
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts).int()
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        local,
        active_num=local.numel(),
        expert_num=num_experts + 1,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
    )
    y = _per_expert(silu_and_mul(_per_expert(rows, gate_up, counts)), down, counts)
    # Rows in no group are uninitialised memory and are set to zero. If any place is -1 there is such a row, and the
    # last row is one.
    is_written = torch.arange(len(y), device=y.device) < counts.sum()
    y = torch.where(is_written.unsqueeze(1), y, 0)
    places = torch.where(places < 0, len(y) - 1, places)
    return cast(Tensor, torch_npu.npu_moe_token_unpermute(y, places, probs=weights))


def _per_expert(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's weight [E, out, in], transposed: [rows, out]."""
    products = torch_npu.npu_grouped_matmul(
        [rows], [weight.transpose(1, 2)], split_item=2, group_type=0, group_list=counts, group_list_type=COUNTS
    )
    return cast(Tensor, products[0])


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.max(dim=-1)
    return values, places


draw, log_probabilities = sampling.draw, sampling.log_probabilities


def keep_top(logits: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    vocab_size = logits.shape[-1]
    ks = [min(k, vocab_size) if k > 0 else vocab_size for k in top_ks]
    if max(ks) > MAX_TOP_K and any(k < vocab_size for k in ks):
        logits = _mask_below(logits, ks)  # the operator limits k
    p = torch.tensor(top_ps, dtype=logits.dtype).to(logits.device)
    if max(ks) > MAX_TOP_K:
        return cast(Tensor, torch_npu.npu_top_k_top_p(logits, p=p))
    return cast(Tensor, torch_npu.npu_top_k_top_p(logits, p=p, k=torch.tensor(ks, dtype=torch.int32).to(logits.device)))


def _mask_below(logits: Tensor, ks: Sequence[int]) -> Tensor:
    """``logits`` with -inf for values smaller than the k-th largest of their row."""
    ranked = logits.sort(dim=-1, descending=True)[0]
    places = torch.tensor(ks).to(logits.device).unsqueeze(1) - 1
    return logits.masked_fill(logits < ranked.gather(1, places), -torch.inf)
