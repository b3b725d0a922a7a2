"""The Llama-family decoder (see ``model_family`` for the others, by config): whole, or one rank's shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal_kernels import ops
from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.model.layers import DecoderLayer, LayerCache, StepInputs, Weights
from shoal_replica.model.lora import StepAdapters
from shoal_replica.model.parallel_group import ParallelGroup, SoleRank
from shoal_replica.model.rotary import rotary_caches
from shoal_replica.model.weights import DTYPES
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard


class LlamaDecoder:
    """Embedding, decoder layers, final norm and language-model head over packed weights.

    Args:
        config: shape of the model.
        weights: as returned by ``load_weights`` for the shard; not copied.
        shard, group: what this rank holds and how it reaches the others; None means the whole model on one rank.

    Attributes:
        num_layers_begun: over all steps. A caller that repeats steps without calling it, as a graph does, must add to
            it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        self.config = config
        self.num_layers_begun = 0
        self.shard = shard = shard or whole_shard(config)
        self.group = group = group or SoleRank()
        self.layers = [DecoderLayer(config, shard, group, weights, i) for i in shard.layers]
        self.dtype, self.device = DTYPES[config.dtype], self.layers[0].device
        self.embed_tokens = weights.get("embed_tokens.weight")
        self.norm = weights.get("norm.weight")
        self.lm_head = weights.get("lm_head.weight")
        self.cos_sin_caches = rotary_caches(config, self.dtype, self.device)

    @torch.inference_mode()
    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        sample_rows: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Compute a step's tokens, write their KV, and compute the logits of the rows that sample.

        Args:
            input_ids, positions: integers [num_tokens].
            caches: keys and values of each of this rank's layers.
            sample_rows: integers [num_samples]; rows of ``input_ids`` whose next token is wanted.

        Returns:
            float32 [num_samples, vocab_size]; [0, vocab_size] on a stage that is not the last.
        """
        step = StepInputs(positions, *self.cos_sin_caches, metadata, adapters)
        x = self._embed(input_ids) if self.shard.is_first_stage else self._receive(len(input_ids))
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            self.num_layers_begun += 1
            x, residual = layer(x, residual, cache, step)
        if not self.shard.is_last_stage:
            self.group.send_to_next_stage(x if residual is None else x + residual)
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        x = x[sample_rows]
        if residual is not None:
            x = x + residual[sample_rows]
        return self._logits(x)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Each rank looks up the tokens in its own vocabulary rows; the sum over the ranks has all of them."""
        assert self.embed_tokens is not None
        if self.shard.tensor_size == 1:
            return self._scaled(functional.embedding(input_ids, self.embed_tokens))
        rows = input_ids - self.shard.vocab.start
        is_mine = (rows >= 0) & (rows < len(self.shard.vocab))
        x = functional.embedding(torch.where(is_mine, rows, 0), self.embed_tokens)
        return self._scaled(self.group.all_reduce(x * is_mine.unsqueeze(1)))

    def _scaled(self, embeddings: Tensor) -> Tensor:
        scale = self.config.embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def _receive(self, num_tokens: int) -> Tensor:
        x = torch.empty(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return self.group.receive_from_previous_stage(x)

    def _logits(self, x: Tensor) -> Tensor:
        """The logits: the ranks' columns side by side, without the padding of the last ranks' shares."""
        assert self.norm is not None
        assert self.lm_head is not None
        logits = ops.linear(ops.rms_norm(x, self.norm, self.config.rms_norm_eps), self.lm_head)
        if self.shard.tensor_size > 1 and len(logits):
            logits = functional.pad(logits, (0, self.shard.vocab_share - len(self.shard.vocab)))
            logits = self.group.all_gather(logits)
        logits, divisor = logits[:, : self.config.vocab_size].float(), self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor
