"""Tiny checkpoints in shapes that NPU attention takes, and how their tokens are compared with the CPU's.

Random weights make the two best tokens nearly equal now and then, and bfloat16 may then choose either. So tokens are
compared up to the first such place: where the NPU goes another way, the CPU in float32 must have been undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from transformers import (
    Exaone4Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from shoal_replica import LLM, SamplingParams
from shoal_replica.llm import RequestOutput

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
LENGTHS = [1, 3, 127, 128, 129, 200, 300]
NUM_SHARED = 180
# Difference of log-probabilities below which bfloat16 may take the second token; the mean of all is 0.8.
UNDECIDED = 0.35

SHAPE: dict[str, Any] = tiny_models.SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 512}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=128, tie_word_embeddings=True),
    "llama-padded": lambda: LlamaConfig(**SHAPE, head_dim=64),  # a head size that is not packed
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=128, sliding_window=100),
    "phi3": lambda: Phi3Config(**SHAPE, head_dim=128, sliding_window=100, partial_rotary_factor=0.75),
    "exaone4": lambda: Exaone4Config(**SHAPE, head_dim=128, sliding_window=100, sliding_window_pattern=2),
    "granite": lambda: GraniteConfig(
        **SHAPE,
        head_dim=128,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "olmo3": lambda: Olmo3Config(
        **SHAPE,
        head_dim=128,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=tiny_models.OLMO_ROPE,
    ),
    "smollm3": lambda: SmolLM3Config(**SHAPE, head_dim=128, no_rope_layers=[1, 0]),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=128),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SHAPE | tiny_models.SHARED_EXPERTS, head_dim=128, first_k_dense_replace=1, use_qk_norm=True
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=128, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


def make_folder(family: str, folder: Path) -> Path:
    """A bfloat16 checkpoint with a tokenizer."""
    tiny_models.FAMILIES[f"npu-{family}"] = FAMILIES[family]
    return write_tiny_tokenizer(tiny_models.make_checkpoint(f"npu-{family}", folder, torch.bfloat16))


def make_prompts() -> list[list[int]]:
    """The last two share their first NUM_SHARED tokens, a block and more."""
    prompts = tiny_models.make_prompts(LENGTHS)
    prompts.append(prompts[-1][:NUM_SHARED] + prompts[1])
    return prompts


@dataclass(frozen=True)
class Expected:
    """The CPU's greedy tokens in float32, and how sure it was of each."""

    token_ids: list[list[int]]
    gaps: list[list[float]]

    @classmethod
    def of(cls, folder: Path, prompts: list[list[int]], adapter: str | list[str] = "", **settings: Any) -> Expected:
        with LLM(str(folder), dtype="float32", num_blocks=256, max_num_seqs=16, **settings) as llm:
            outputs = llm.generate(prompts, GREEDY, adapter)
        return cls([o.token_ids for o in outputs], [_gaps(o) for o in outputs])

    def check(self, outputs: list[RequestOutput]) -> None:
        """Raise AssertionError where tokens differ though the CPU was sure, or where too little could be compared."""
        num_compared = 0
        for index, (output, token_ids, gaps) in enumerate(zip(outputs, self.token_ids, self.gaps, strict=True)):
            assert len(output.token_ids) == len(token_ids)
            for place, (mine, expected, gap) in enumerate(zip(output.token_ids, token_ids, gaps, strict=True)):
                if mine != expected:
                    assert gap < UNDECIDED, f"prompt {index}, token {place}: {mine} for {expected}, surer by {gap:.2f}"
                    break
                num_compared += 1
        assert num_compared > len(outputs) * NUM_TOKENS // 2


def _gaps(output: RequestOutput) -> list[float]:
    return [logprobs.top[0][1] - logprobs.top[1][1] for logprobs in output.outputs[0].logprobs]
