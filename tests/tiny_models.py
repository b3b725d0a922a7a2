"""Tiny random checkpoints of each served family, made with transformers: real files, real shapes, small numbers.

Weights are drawn wide (standard deviation 0.3), so that the two best logits lie far apart and greedy outputs vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Exaone4Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 320
MAX_MODEL_LEN = 256
SLIDING_WINDOW = 24
EOS_TOKEN_ID = 2

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# As of a context of 64 made four times as long; the divisors are the same for short and long sequences, because
# transformers goes by each sequence's length.
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.5],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.5],
}
# By kind of layer: those that see all tokens are scaled, those with a window have a base of their own.
GEMMA_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
OLMO_ROPE: dict[str, Any] = {
    "full_attention": YARN_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
NINE_HEADS: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-llama3-rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True),
    "llama-9-heads": lambda: LlamaConfig(**SHAPE | NINE_HEADS, head_dim=16),
    "llama-heads-of-24": lambda: LlamaConfig(**SHAPE, head_dim=24),  # not for native kernels
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=SLIDING_WINDOW, head_dim=16),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=2, head_dim=16),
    "phi3": lambda: Phi3Config(**SHAPE, sliding_window=SLIDING_WINDOW),
    "phi3-longrope": lambda: Phi3Config(
        **SHAPE, rope_parameters=LONG_ROPE, original_max_position_embeddings=64, tie_word_embeddings=True
    ),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1], rope_parameters=YARN_ROPE),
    "qwen2-windows": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        head_dim=32,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=24,
        layer_types=LAYER_TYPES,
        rope_parameters=GEMMA_ROPE,
    ),
    "gemma3-one-kv-head": lambda: Gemma3TextConfig(
        **SHAPE | {"num_key_value_heads": 1}, head_dim=16, sliding_window=SLIDING_WINDOW
    ),
    "granite": lambda: GraniteConfig(
        **SHAPE,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "granite-moe": lambda: GraniteMoeConfig(
        **SHAPE | {"intermediate_size": 48},
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "granite-moe-shared": lambda: GraniteMoeSharedConfig(
        **SHAPE | {"intermediate_size": 48},
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SHAPE, **SHARED_EXPERTS, head_dim=32, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True
    ),
    "dots1": lambda: Dots1Config(
        **SHAPE,
        **SHARED_EXPERTS,
        head_dim=16,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=1,
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **SHAPE, num_local_experts=6, num_experts_per_tok=2, head_dim=32, rotary_dim=16
    ),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "olmo3": lambda: Olmo3Config(
        **SHAPE,
        sliding_window=SLIDING_WINDOW,
        layer_types=LAYER_TYPES,
        rope_parameters=OLMO_ROPE,
    ),
    "exaone4": lambda: Exaone4Config(**SHAPE, head_dim=16, sliding_window=SLIDING_WINDOW, sliding_window_pattern=2),
    "exaone4-full": lambda: Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 3),
    "qwen3-moe-plain": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=False),
}


def make_checkpoint(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a random checkpoint of ``family`` (a key of FAMILIES), without tokenizer, to ``folder``; return it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # transformers starts these at exactly 0 and 1, which would hide a bias or norm left out.
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                    if family.startswith("gemma"):
                        parameter.sub_(1.0)  # which it adds
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as a transformers model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def oracle_greedy(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, draft: Sequence[int] = (), eos: int | None = None
) -> list[int]:
    """``num_tokens`` greedy tokens of transformers, fewer only where ``eos`` comes and ends them.

    ``draft`` guesses them, which costs less and changes nothing: one pass verifies the part of it that is right, and
    only from its first wrong token on does each take a step of its own.
    """
    right: list[int] = []
    if guess := list(draft[:num_tokens]):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + guess[:-1]])).logits[0, len(prompt) - 1 :]
        for best, guessed in zip(logits.argmax(dim=-1).tolist(), guess, strict=True):
            if best != guessed:
                break
            right.append(best)
            if best == eos:
                return right
    if len(right) == num_tokens:
        return right
    ids = torch.tensor([prompt + right])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens - len(right),
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


class GreedyOracle:
    """What transformers answers to some prompts: asked once, when there are answers to compare with it."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> None:
        self._model, self._prompts, self._num_tokens = model, prompts, num_tokens
        self._answers: list[list[int]] = []

    def answers(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Its answers, for which ``drafts`` are guesses that change nothing."""
        if not self._answers:
            asked = zip(self._prompts, drafts, strict=True)
            self._answers = [oracle_greedy(self._model, prompt, self._num_tokens, draft) for prompt, draft in asked]
        return self._answers


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths, free of special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
