"""The operators in plain float32 torch, one token and one head at a time: slow, and the test oracle for every backend.

Signatures and meaning are those of ``ops``; results are float32 whatever the inputs. A backend is correct if it equals
these up to its dtype's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.metadata import AttentionMetadata


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps), total


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(positions, q, cos_sin_cache), _rotate(positions, k, cos_sin_cache)


def _rotate(positions: Tensor, x: Tensor, cos_sin_cache: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=torch.float32)
    for token, position in enumerate(positions.tolist()):
        cos, sin = cos_sin_cache[position, :half].float(), cos_sin_cache[position, half:].float()
        for head in range(x.shape[1]):
            first, second = x[token, head, :half].float(), x[token, head, half:].float()
            out[token, head, :half] = first * cos - second * sin
            out[token, head, half:] = second * cos + first * sin
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :size].float(), gate_up[:, size:].float()
    return gate / (1 + torch.exp(-gate)) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :size].float(), gate_up[:, size:].float()
    return 0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def select_experts(
    router_logits: Tensor,
    num_chosen: int,
    renormalize: bool,
    scores: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = router_logits.float()
    likely = torch.softmax(logits, dim=-1) if scores == "softmax" else torch.sigmoid(logits)
    order = (likely if bias is None else likely + bias).sort(dim=-1, descending=True, stable=True).indices
    expert_ids = order[:, :num_chosen]
    weights = likely.gather(1, expert_ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * scale, expert_ids


def apply_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor, first_expert: int
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        for weight, expert_id in zip(weights[token].tolist(), expert_ids[token].tolist(), strict=True):
            expert = expert_id - first_expert
            if 0 <= expert < len(gate_up):
                out[token] += (
                    weight * linear(silu_and_mul(linear(x[token : token + 1], gate_up[expert])), down[expert])[0]
                )
    return out


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        block_id, offset = divmod(slot, block_size)
        key_cache[block_id, :, offset] = k[token]
        value_cache[block_id, :, offset] = v[token]


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    num_heads, block_size = q.shape[1], key_cache.shape[2]
    group = num_heads // key_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32)
    for seq, seq_len in enumerate(metadata.seq_lens):
        places = [(int(metadata.block_tables[seq, p // block_size]), p % block_size) for p in range(seq_len)]
        start, end = metadata.query_start_loc[seq], metadata.query_start_loc[seq + 1]
        for row in range(start, end):
            position = seq_len - (end - row)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = places[first : position + 1]
            for head in range(num_heads):
                keys = torch.stack([key_cache[block, head // group, offset].float() for block, offset in visible])
                values = torch.stack([value_cache[block, head // group, offset].float() for block, offset in visible])
                weights = torch.softmax(keys @ q[row, head].float() * scale, dim=0)
                out[row, head] = weights @ values
    return out


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for cache in (key_cache, value_cache):
        before = cache.clone()
        for source, destination in pairs:
            cache[destination] = before[source]


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.max(dim=-1)
    return values, places


def keep_top(logits: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    out = torch.full(logits.shape, -torch.inf)
    for row, (top_k, top_p) in enumerate(zip(top_ks, top_ps, strict=True)):
        by_rank = sorted((-value, token_id) for token_id, value in enumerate(logits[row].tolist()))
        if top_k:
            by_rank = [item for item in by_rank if item[0] <= by_rank[top_k - 1][0]]
        probs = torch.softmax(torch.tensor([-value for value, _ in by_rank], dtype=torch.float64), dim=0).tolist()
        before = 0.0
        for (_, token_id), prob in zip(by_rank, probs, strict=True):
            if before < top_p or top_p == 1.0:
                out[row, token_id] = logits[row, token_id]
            before += prob
    return out


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return [_draw_one(logits[row].tolist(), how) for row, how in zip(rows, draws, strict=True)]


def _draw_one(row: list[float], how: Draw) -> int:
    """Weights in float64, dropped one filter after another; then a walk along their running sum."""
    largest = max(row)
    weights = [math.exp((value - largest) / how.divisor) for value in row]
    if how.min_p:
        weights = [weight if weight >= how.min_p else 0.0 for weight in weights]
    if 0 < how.top_k < len(row):
        kth = sorted(weights, reverse=True)[how.top_k - 1]
        weights = [weight if weight >= kth else 0.0 for weight in weights]
    if how.top_p < 1.0:
        total, before = sum(weights), 0.0
        for token_id in sorted(range(len(row)), key=lambda token_id: (-weights[token_id], token_id)):
            weight = weights[token_id]
            if before >= how.top_p * total:
                weights[token_id] = 0.0
            before += weight
    target, reached = how.uniform * sum(weights), 0.0
    for token_id, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token_id
    return max(token_id for token_id, weight in enumerate(weights) if weight)


def log_probabilities(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[LogProbabilities]:
    found = []
    for number, token_id, count in zip(rows, token_ids, counts, strict=True):
        row = logits[number]
        scores, logprobs = (row - row.max()).tolist(), row.double().log_softmax(-1).tolist()
        best = sorted(range(len(row)), key=lambda place: (-scores[place], place))[:count]
        found.append(LogProbabilities(logprobs[token_id], tuple((place, logprobs[place]) for place in best)))
    return found
