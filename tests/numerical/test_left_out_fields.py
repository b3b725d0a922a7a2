"""What a config.json leaves out, but for sizes, is what transformers has in its place, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal_replica.errors import ConfigError
from shoal_replica.model_config import ModelConfig
from shoal_replica.model_family import _FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MODEL_TYPES = {architecture: kind for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


def write(folder: Path, architecture: str, **fields: Any) -> Path:
    """A folder whose config.json has sizes alone, those of experts only where the family has some, and ``fields``."""
    kind = MODEL_TYPES[architecture]
    sizes = SIZES | (EXPERTS if any(name in kind for name in ("moe", "mixtral", "dots1", "minimax")) else {}) | fields
    raw = {"architectures": [architecture], "model_type": kind}
    raw |= {"text_config": sizes, "vision_config": {}} if kind == "gemma3" else sizes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def layers_of_transformers(config: PretrainedConfig) -> list[tuple[int | None, float]]:
    """Each layer's window and base."""
    window, rope = getattr(config, "sliding_window", None), config.rope_parameters
    every = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    return [(window if kind == "sliding_attention" else None, rope.get(kind, rope)["rope_theta"]) for kind in kinds]


def layers_of(model: ModelConfig) -> list[tuple[int | None, float]]:
    full = range(model.num_layers) if model.sliding_window is None else model.full_layers
    of_window = (model.sliding_window, model.window_rope_theta or model.rope_theta)
    return [(None, model.rope_theta) if layer in full else of_window for layer in range(model.num_layers)]


def compare(folder: Path) -> None:
    ours, theirs = ModelConfig.from_folder(folder), AutoConfig.from_pretrained(folder).get_text_config()
    assert layers_of(ours) == layers_of_transformers(theirs)
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize("architecture", list(_FAMILIES))
def test_a_config_of_sizes_alone_means_what_it_means_to_transformers(tmp_path: Path, architecture: str) -> None:
    compare(write(tmp_path, architecture))


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Olmo2ForCausalLM", "Exaone4ForCausalLM"])
def test_null_is_no_window_and_no_end(tmp_path: Path, architecture: str) -> None:
    folder = write(tmp_path, architecture, sliding_window=None, eos_token_id=None, layer_types=["full_attention"] * 6)
    compare(folder)
    model = ModelConfig.from_folder(folder)
    assert (model.sliding_window, model.eos_token_ids) == (None, ())


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_that_is_used_has_the_familys_size(tmp_path: Path, architecture: str) -> None:
    folder = write(tmp_path, architecture, use_sliding_window=True, max_window_layers=2)
    compare(folder)
    assert ModelConfig.from_folder(folder).sliding_window == 4096


def test_a_window_that_is_used_but_not_served_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3MoeForCausalLM", use_sliding_window=True)
    assert AutoConfig.from_pretrained(folder).sliding_window == 4096
    with pytest.raises(ConfigError, match="use_sliding_window in config"):
        ModelConfig.from_folder(folder)
