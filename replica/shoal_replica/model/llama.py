"""The Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3, by config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal_kernels import ops
from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.config import ModelConfig
from shoal_replica.model.layers import DecoderLayer, LayerCache, StepInputs, Weights, rotary_cache


class LlamaDecoder:
    """Embedding, decoder layers, final norm and language-model head over packed weights.

    Args:
        config: shape of the model.
        weights: as ``load_weights`` gives them; they are not copied.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.embed_tokens = weights["embed_tokens.weight"]
        self.layers = [DecoderLayer(config, weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.norm = weights["norm.weight"]
        self.lm_head = weights["lm_head.weight"]
        self.eps = config.rms_norm_eps
        self.cos_sin_cache = rotary_cache(config, self.embed_tokens.dtype, self.embed_tokens.device)

    @torch.inference_mode()
    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        sample_rows: Tensor,
    ) -> Tensor:
        """Compute a step's tokens, writing their KV, and the logits of the rows that sample.

        Args:
            input_ids, positions: int64 [num_tokens].
            caches: keys and values of each layer.
            sample_rows: int64 [num_samples]; rows of ``input_ids`` whose next token is wanted.

        Returns:
            float32 [num_samples, vocab_size].
        """
        step = StepInputs(positions, self.cos_sin_cache, metadata)
        x: Tensor = functional.embedding(input_ids, self.embed_tokens)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, step)
        x = x[sample_rows]
        if residual is not None:
            x = x + residual[sample_rows]
        return ops.linear(ops.rms_norm(x, self.norm, self.eps), self.lm_head).float()
