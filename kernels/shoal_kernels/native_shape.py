"""The shape of a native decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal_kernels import native_limits
from shoal_kernels.native_library import CShape

DTYPES = {getattr(torch, name): number for name, number in native_limits.DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-family decoder, or a rank's shard of one, and its KV pool.

    Attributes:
        dtype: of weights, activations and KV.
        vocab_size, hidden_size: those of the whole model; other sizes and counts are the shard's.
        first_layer: index of the shard's first layer in the whole model.
        unrotated_layers: those of the shard's layers, by their index in the whole model, whose queries and keys are not
            rotated.
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
    vocab: range | None = None
    is_first_stage: bool = True
    is_last_stage: bool = True

    @property
    def vocab_rows(self) -> range:
        return range(self.vocab_size) if self.vocab is None else self.vocab


def c_shape(shape: DecoderShape, kernels: str) -> CShape:
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
        rms_norm_eps=shape.rms_norm_eps,
        kernels=kernels.encode(),
    )
