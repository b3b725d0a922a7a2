"""The shape of a native decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal_kernels import native_limits
from shoal_kernels.native_library import CShape

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
DTYPES = {getattr(torch, name): number for name, number in native_limits.DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixtures of experts that replace the MLP in some layers, by their index in the whole model.

    Attributes:
        num_experts: of each such layer, ``held`` of which the shard has.
        size: of an expert's MLP.
        renormalize: whether the weights of a token's experts add up to 1, before they are multiplied by ``scale``.
        scores: "softmax" or "sigmoid", see ``ops.select_experts``.
        shared_size: the shard's columns of the MLP that all tokens pass through beside the experts; 0 if there is none.
    """

    num_experts: int
    num_experts_per_token: int
    size: int
    renormalize: bool
    layers: tuple[int, ...]
    held: range
    scores: str = "softmax"
    scale: float = 1.0
    shared_size: int = 0


NO_EXPERTS = ExpertShape(num_experts=0, num_experts_per_token=0, size=0, renormalize=False, layers=(), held=range(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-family decoder, or a rank's shard of one, and its KV pool.

    Attributes:
        dtype: of weights, activations and KV.
        vocab_size, hidden_size: those of the whole model; other sizes and counts are the shard's.
        first_layer: index of the shard's first layer in the whole model.
        unrotated_layers, full_layers: by their index in the whole model, the layers whose queries and keys are not
            rotated, and those that have not the ``sliding_window`` of the others.
        norm_placement: "pre", "post" or "both", see ``ModelConfig``.
        norms_span_heads: whether norms of queries and keys are of all heads together.
        activation: "silu" or "gelu_tanh".
        attention_scale: None means 1 / sqrt(head_size).
        vocab: rows of embedding and head that the shard holds; None means all.
    """

    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    tied_embeddings: bool
    sliding_window: int | None
    max_positions: int
    block_size: int
    num_blocks: int
    num_threads: int
    first_layer: int = 0
    unrotated_layers: tuple[int, ...] = ()
    full_layers: tuple[int, ...] = ()
    norm_placement: str = "pre"
    norms_span_heads: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0
    experts: ExpertShape | None = None
    vocab: range | None = None
    is_first_stage: bool = True
    is_last_stage: bool = True

    def __post_init__(self) -> None:
        if self.experts is not None and self.norm_placement != "pre":
            raise ValueError("experts: their layers have no norms after them")

    @property
    def vocab_rows(self) -> range:
        return range(self.vocab_size) if self.vocab is None else self.vocab

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of each layer, besides those of queries and keys."""
        places = {"pre": ("norm",), "post": ("post_norm",), "both": ("norm", "post_norm")}[self.norm_placement]
        return tuple(f"{part}_{place}" for part in ("attention", "mlp") for place in places)


def c_shape(shape: DecoderShape, kernels: str) -> CShape:
    experts = shape.experts or NO_EXPERTS
    return CShape(
        dtype=DTYPES[shape.dtype],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        num_threads=shape.num_threads,
        sliding_window=shape.sliding_window or 0,
        max_positions=shape.max_positions,
        tied_embeddings=int(shape.tied_embeddings),
        vocab_begin=shape.vocab_rows.start,
        vocab_rows=len(shape.vocab_rows),
        is_first_stage=int(shape.is_first_stage),
        is_last_stage=int(shape.is_last_stage),
        norms_span_heads=int(shape.norms_span_heads),
        gelu=ACTIVATIONS[shape.activation],
        num_experts=experts.num_experts,
        first_expert=experts.held.start,
        held_experts=len(experts.held),
        experts_per_token=experts.num_experts_per_token,
        expert_size=experts.size,
        shared_size=experts.shared_size,
        renormalizes_experts=int(experts.renormalize),
        sigmoid_router=int(experts.scores == "sigmoid"),
        expert_scale=experts.scale,
        rms_norm_eps=shape.rms_norm_eps,
        embedding_scale=shape.embedding_scale,
        attention_scale=shape.head_size**-0.5 if shape.attention_scale is None else shape.attention_scale,
        kernels=kernels.encode(),
    )
