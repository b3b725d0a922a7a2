"""The parts of a Llama-family decoder layer: each holds views of packed weights and is called on activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.model.lora import StepAdapters
from shoal_replica.model.parallel_group import ParallelGroup
from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig
from shoal_replica.shard import Shard

Weights = dict[str, Tensor]
LayerCache = tuple[Tensor, Tensor]
"""One layer's keys and values, each of ``ops.cache_shape``."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs that all layers of a step share.

    Attributes:
        positions: integers [num_tokens].
        cos_sin_cache, window_cos_sin_cache: [max_positions, head_size], see ``rotary_caches``.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    window_cos_sin_cache: Tensor
    attention: AttentionMetadata
    adapters: StepAdapters | None = None


class Linear:
    """``x @ weight.T + bias``, bias optional, plus what the adapters of its rows add."""

    __slots__ = ("bias", "name", "weight")

    def __init__(self, weights: Weights, name: str) -> None:
        self.name = name
        self.weight = weights[f"{name}.weight"]
        self.bias = weights.get(f"{name}.bias")

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        out = ops.linear(x, self.weight, self.bias)
        if adapters is not None:
            adapters.add(out, x, self.name)
        return out


class RowParallelLinear(Linear):
    """A Linear whose input columns are spread over the ranks; an all-reduce adds up their partial products."""

    __slots__ = ("group",)

    def __init__(self, weights: Weights, name: str, group: ParallelGroup) -> None:
        super().__init__(weights, name)
        self.group = group

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self.group.all_reduce(super().__call__(x, adapters))


class Attention:
    """Grouped-query attention with rotary embeddings over a rank's heads. Some families also norm queries and keys, and
    in some layers have a window or know no positions.
    """

    def __init__(self, config: ModelConfig, shard: Shard, group: ParallelGroup, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}."
        self.is_rotated = layer not in config.unrotated_layers
        self.qkv_proj = Linear(weights, f"{prefix}qkv_proj")
        self.o_proj = RowParallelLinear(weights, f"{prefix}o_proj", group)
        self.q_norm = weights.get(f"{prefix}q_norm.weight")
        self.k_norm = weights.get(f"{prefix}k_norm.weight")
        self.num_heads = [len(shard.heads), len(shard.kv_heads), len(shard.kv_heads)]
        self.head_size = config.head_size
        self.norms_span_heads = config.qk_norm_spans_heads
        self.eps = config.rms_norm_eps
        self.scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
        self.sliding_window = None if layer in config.full_layers else config.sliding_window

    def __call__(self, x: Tensor, cache: LayerCache, step: StepInputs) -> Tensor:
        """x [T, hidden] → [T, hidden]; the step's keys and values are written to ``cache`` first."""
        num_tokens = x.shape[0]
        heads = self.qkv_proj(x, step.adapters).view(num_tokens, -1, self.head_size)
        q, k, v = torch.split(heads, self.num_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        if self.is_rotated:
            table = step.cos_sin_cache if self.sliding_window is None else step.window_cos_sin_cache
            q, k = ops.rotary_embedding(step.positions, q, k, table)
        else:
            q, k = q.contiguous(), k.contiguous()
        ops.write_kv(k, v, *cache, step.attention.slot_mapping)
        out = ops.paged_attention(q, *cache, step.attention, self.scale, self.sliding_window)
        return self.o_proj(out.view(num_tokens, -1), step.adapters)

    def _norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """heads [T, H, D], each by itself, or all of a token together."""
        rows = heads.flatten(1) if self.norms_span_heads else heads
        return ops.rms_norm(rows, weight, self.eps).view(heads.shape)


class Mlp:
    """The gated MLP over a rank's columns."""

    def __init__(self, activation: str, group: ParallelGroup, weights: Weights, prefix: str) -> None:
        self.gate_and_mul = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}[activation]
        self.gate_up_proj = Linear(weights, f"{prefix}gate_up_proj")
        self.down_proj = RowParallelLinear(weights, f"{prefix}down_proj", group)

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self.down_proj(self.gate_and_mul(self.gate_up_proj(x, adapters)), adapters)


class Experts:
    """A mixture of gated MLPs: every rank routes all tokens and computes the experts that it holds; and its columns of
    the one that all tokens pass through, if there is one. No adapter changes it.
    """

    def __init__(self, moe: MoeConfig, shard: Shard, group: ParallelGroup, weights: Weights, prefix: str) -> None:
        self.router = weights[f"{prefix}router.weight"]
        self.router_bias = weights.get(f"{prefix}router.bias")
        self.shared = Mlp("silu", group, weights, f"{prefix}shared_mlp.") if moe.shared_size else None
        self.moe = moe
        self.first = shard.experts.start
        self.group = group
        gate_up = weights[f"{prefix}experts.gate_up_proj.weight"]
        self.gate_up = gate_up.view(len(shard.experts), 2 * moe.intermediate_size, -1)
        self.down = weights[f"{prefix}experts.down_proj.weight"].view(len(shard.experts), -1, moe.intermediate_size)

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        moe, logits = self.moe, ops.linear(x, self.router, None)
        chosen, ids = ops.select_experts(
            logits, moe.num_experts_per_token, moe.renormalize, moe.scores, self.router_bias, moe.scale
        )
        made = self.group.all_reduce(ops.apply_experts(x, self.gate_up, self.down, chosen, ids, self.first))
        return made if self.shared is None else made + self.shared(x)


class DecoderLayer:
    """Attention, then MLP or experts; each is preceded by a norm, followed by one, or both, and added to the residual
    stream.
    """

    def __init__(self, config: ModelConfig, shard: Shard, group: ParallelGroup, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}."
        self.attention = Attention(config, shard, group, weights, layer)
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            weights.get(f"{prefix}{name}.weight")
            for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        )
        moe = config.moe
        self.mlp: Mlp | Experts
        if moe is not None and layer in moe.layers:
            self.mlp = Experts(moe, shard, group, weights, prefix)
        else:
            self.mlp = Mlp(config.activation, group, weights, prefix)
        self.eps = config.rms_norm_eps

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: LayerCache, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden] → the same. The residual stream is their sum, which the next norm computes."""
        x, residual = self._before(x, residual, self.attention_norm)
        x = self._after(self.attention(x, cache, step), self.attention_post_norm)
        x, residual = self._before(x, residual, self.mlp_norm)
        return self._after(self.mlp(x, step.adapters), self.mlp_post_norm), residual

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(norm.device for norm in (self.mlp_norm, self.mlp_post_norm) if norm is not None)

    def _before(self, x: Tensor, residual: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """What attention or MLP gets, and the residual stream with ``x`` added."""
        if norm is None:
            total = x if residual is None else x + residual
            return total, total
        if residual is None:
            return ops.rms_norm(x, norm, self.eps), x
        return ops.add_rms_norm(x, residual, norm, self.eps)

    def _after(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else ops.rms_norm(x, norm, self.eps)
