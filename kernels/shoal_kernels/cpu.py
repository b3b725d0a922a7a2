"""The operators for CPUs, in vectorised torch. Signatures and meaning are those of ``ops``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from shoal_kernels import native, native_rows, sampling
from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.metadata import AttentionMetadata


def cache_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, ...]:
    return (num_blocks, num_kv_heads, block_size, head_size)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def select_experts(
    router_logits: Tensor, num_chosen: int, renormalize: bool, scores: str, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if scores == "softmax":
        weights, expert_ids = router_logits.softmax(dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
    else:
        weights, expert_ids = choose_by_sigmoid(router_logits, num_chosen, bias)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights * scale).to(router_logits.dtype), expert_ids


def choose_by_sigmoid(router_logits: Tensor, num_chosen: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores of the experts with the highest scores and bias, and which these are. On any device."""
    scores = router_logits.float().sigmoid()
    expert_ids = (scores if bias is None else scores + bias).topk(num_chosen, dim=-1).indices
    return scores.gather(1, expert_ids), expert_ids


def apply_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor, first_expert: int
) -> Tensor:
    out = torch.zeros_like(x)
    # Sort the choices by expert, so that each expert's tokens are contiguous.
    choices, order = expert_ids.flatten().sort(stable=True)
    num_chosen = expert_ids.shape[1]
    bounds = torch.searchsorted(choices, torch.arange(first_expert, first_expert + len(gate_up) + 1)).tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        places = order[start:stop]
        tokens = places // num_chosen
        y = linear(silu_and_mul(linear(x[tokens], gate_up[expert])), down[expert])
        out.index_add_(0, tokens, y * weights.flatten()[places].unsqueeze(1))
    return out


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = key_cache.shape[2]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block_ids, :, offsets] = k
    value_cache[block_ids, :, offsets] = v


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    decodes: list[int] = []
    for seq, query_len in enumerate(metadata.query_lens):
        if query_len == 1:
            decodes.append(seq)
            continue
        start = metadata.query_start_loc[seq]
        rows = slice(start, start + query_len)
        seq_len, table = metadata.seq_lens[seq], metadata.block_tables[seq : seq + 1]
        out[rows] = _prefill(q[rows], key_cache, value_cache, table, seq_len, scale, sliding_window)
    if len(decodes) == metadata.num_seqs == q.shape[0]:
        return _decode(q, key_cache, value_cache, metadata.block_tables, metadata.seq_lens, scale, sliding_window)
    if decodes:
        decode_rows = torch.tensor([metadata.query_start_loc[seq] for seq in decodes])
        tables = metadata.block_tables[torch.tensor(decodes)]
        seq_lens = [metadata.seq_lens[seq] for seq in decodes]
        out[decode_rows] = _decode(q[decode_rows], key_cache, value_cache, tables, seq_lens, scale, sliding_window)
    return out


def _decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """One query for each of n sequences, all at once: [n, Hq, D]. A KV head's queries are the rows of one product."""
    num_seqs, num_heads, head_size = q.shape
    longest = max(seq_lens)
    keys = _gather(key_cache, tables, longest)
    values = _gather(value_cache, tables, longest)
    lens = torch.tensor(seq_lens).unsqueeze(1)
    positions = torch.arange(longest)
    visible = positions < lens
    if sliding_window is not None:
        visible &= positions >= lens - sliding_window
    grouped = q.view(num_seqs, key_cache.shape[1], -1, head_size)
    out = functional.scaled_dot_product_attention(grouped, keys, values, visible[:, None, None, :], scale=scale)
    return out.reshape(num_seqs, num_heads, head_size)


def _prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """The last tokens of one sequence: q [t, Hq, D] over ``seq_len`` tokens → [t, Hq, D]."""
    num_queries, num_heads, head_size = q.shape
    num_kv_heads = key_cache.shape[1]
    # The KV head is the batch dimension, the query head within its group is the head dimension: the group shares its
    # keys by a stride of 0, not by a copy.
    grouped = q.view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    shared = (num_kv_heads, num_heads // num_kv_heads, seq_len, head_size)
    keys = _gather(key_cache, table, seq_len).transpose(0, 1).expand(shared)
    values = _gather(value_cache, table, seq_len).transpose(0, 1).expand(shared)
    visible = None
    whole = num_queries == seq_len and (sliding_window is None or sliding_window >= seq_len)
    if not whole:
        positions = torch.arange(seq_len - num_queries, seq_len).unsqueeze(1)
        visible = torch.ones(num_queries, seq_len, dtype=torch.bool).tril(seq_len - num_queries)
        if sliding_window is not None:
            visible &= torch.arange(seq_len) > positions - sliding_window
    out = functional.scaled_dot_product_attention(grouped, keys, values, visible, is_causal=whole, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def _gather(cache: Tensor, tables: Tensor, seq_len: int) -> Tensor:
    """The first ``seq_len`` tokens of each table's blocks, [n, Hkv, seq_len, D], in one copy of whole tiles."""
    _, num_kv_heads, block_size, head_size = cache.shape
    num_seqs, num_blocks = tables.shape[0], -(-seq_len // block_size)
    heads = torch.arange(num_kv_heads).view(1, -1, 1)
    tiles = tables[:, None, :num_blocks] * num_kv_heads + heads
    gathered = cache.view(-1, block_size * head_size).index_select(0, tiles.flatten())
    return gathered.view(num_seqs, num_kv_heads, num_blocks * block_size, head_size)[:, :, :seq_len]


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    sources, destinations = torch.tensor(pairs).unbind(1)
    for cache in (key_cache, value_cache):
        cache[destinations] = cache[sources]


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    if _is_native(x):
        return native_rows.row_maxima(x)  # torch takes several times as long for the index as for the value
    values, places = x.max(dim=-1)
    return values, places


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return native_rows.draw(logits, rows, draws) if _is_native(logits) else sampling.draw(logits, rows, draws)


def log_probabilities(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[LogProbabilities]:
    operators = native_rows.log_probabilities if _is_native(logits) else sampling.log_probabilities
    return operators(logits, rows, token_ids, counts)


def _is_native(rows: Tensor) -> bool:
    return native.is_available() and rows.dtype == torch.float32 and rows.is_contiguous()


def keep_top(logits: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    vocab_size = logits.shape[-1]
    # Of equally likely tokens at the edge of top-p, those with lower ids stay.
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    ks = torch.tensor([min(k or vocab_size, vocab_size) for k in top_ks]).unsqueeze(1)
    ranked = ranked.masked_fill(ranked < ranked.gather(1, ks - 1), -torch.inf)
    probs = ranked.softmax(dim=-1).double()
    limits = torch.tensor(top_ps, dtype=torch.float64).unsqueeze(1)
    before = probs.cumsum(dim=-1) - probs
    # Rounding may bring the sum to 1 before the last token, so rows that keep everything are not compared.
    ranked = ranked.masked_fill((before >= limits) & (limits < 1.0), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)
