"""The machine's floor: memory bandwidth and matrix throughput, and the least time that a decoder's work takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_replica.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes read and floating-point operations per second, of the cores in use."""

    read_bytes_s: float
    gemm_flops_s: float

    @classmethod
    def best(cls, samples: Sequence[Floor]) -> Floor:
        """The best of each quantity: the floor is what the machine can do, not what it did while busy."""
        return cls(max(s.read_bytes_s for s in samples), max(s.gemm_flops_s for s in samples))

    def decode_s(self, model: ModelConfig, num_seqs: int, context: int, shared: int = 0) -> float:
        """Seconds of a step that decodes a token per sequence: reading weights and KV cache once or computing,
        whichever takes longer. All sequences have the first ``shared`` tokens of their context in common.
        """
        read = model.weight_bytes + (shared + num_seqs * (context - shared)) * model.block_bytes(1)
        return max(read / self.read_bytes_s, num_seqs * _token_flops(model, context, head=True) / self.gemm_flops_s)

    def prefill_s(self, model: ModelConfig, num_tokens: int, cached: int = 0) -> float:
        """Seconds to compute tokens ``[cached, num_tokens)`` of a prompt, and the logits of its last token."""
        flops = sum(_token_flops(model, position, head=False) for position in range(cached, num_tokens))
        return (flops + 2 * model.vocab_size * model.hidden_size) / self.gemm_flops_s

    def batch_s(self, model: ModelConfig, num_seqs: int, prompt_len: int, output_len: int, shared: int = 0) -> float:
        """Seconds for the prefill of ``num_seqs`` prompts, whose first ``shared`` tokens are the same and cached, and
        for decoding their outputs step by step.
        """
        return num_seqs * self.prefill_s(model, prompt_len, shared) + sum(
            self.decode_s(model, num_seqs, prompt_len + i, shared) for i in range(1, output_len)
        )


def _token_flops(model: ModelConfig, context: int, *, head: bool) -> int:
    """Multiplications and additions for one token that attends to ``context`` others; ``head``: with its logits."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    linears = 2 * (model.num_parameters - embeddings)
    attention = 4 * model.num_layers * model.num_heads * model.head_size * context
    return linears + attention + (2 * model.vocab_size * model.hidden_size if head else 0)
