"""Angles of rotary embeddings: those of transformers, for every scaling, and at lengths that need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.model_configs import make_model
from tiny_models import LAYER_TYPES, LINEAR_ROPE, LLAMA3_ROPE, LONG_ROPE, SHAPE, YARN_ROPE
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from shoal_replica.errors import ConfigError
from shoal_replica.memory_plan import rotary_bytes
from shoal_replica.model.rotary import rotary_cache, rotary_caches
from shoal_replica.model_config import ModelConfig

LONG = LONG_ROPE | {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.3, 2.0, 5.0, 11.0, 29.0]}
YARNS: list[dict[str, Any]] = [
    {},
    {"attention_factor": 0.7},
    {"beta_fast": 8, "beta_slow": 2},
    {"mscale": 0.9, "mscale_all_dim": 0.4},
    {"truncate": False},
    {"factor": 1.0},
]


def tables(config: PretrainedConfig, folder: Path, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and that of transformers for a sequence that is as long as the model allows."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return tables_of(config, folder, length)


def tables_of(config: PretrainedConfig, folder: Path, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of a folder's config, ours, and by ``config``, theirs."""
    model = ModelConfig.from_folder(folder, max_model_len=length)
    kind = Phi3RotaryEmbedding if isinstance(config, Phi3Config) else LlamaRotaryEmbedding
    positions = torch.arange(model.max_model_len)[None]
    cos, sin = (part[0] for part in kind(config)(torch.zeros(1), positions))
    half = cos.shape[1] // 2
    return rotary_cache(model, torch.float32, torch.device("cpu")), torch.cat((cos[:, :half], sin[:, :half]), dim=1)


@pytest.mark.parametrize("scaling", [None, LINEAR_ROPE, LLAMA3_ROPE, *(YARN_ROPE | more for more in YARNS)], ids=str)
def test_scalings(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    ours, theirs = tables(LlamaConfig(**SHAPE, rope_parameters=scaling), tmp_path)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_factor_of_a_distilled_model_counts(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B: queries and keys keep their lengths. transformers ignores ``attn_factor``."""
    ours, theirs = tables(
        LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE | {"attn_factor": 0.8782488562869419}), tmp_path
    )
    torch.testing.assert_close(ours, theirs * 0.8782488562869419, atol=2e-5, rtol=1e-5)
    assert float(ours[:, 0].square().add(ours[:, 8].square()).mean()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("length", [64, 65, None])
def test_long_contexts_have_divisors_of_their_own(tmp_path: Path, length: int | None) -> None:
    """Of 16 numbers in a head 12 are rotated; the last two pairs keep the angle 0."""
    config = Phi3Config(**SHAPE, rope_parameters=dict(LONG), original_max_position_embeddings=64)
    ours, theirs = tables(config, tmp_path, length)
    cos, rest, sin, still = ours.split((6, 2, 6, 2), dim=1)
    torch.testing.assert_close(torch.cat((cos, sin), dim=1), theirs, atol=2e-5, rtol=1e-5)
    assert torch.equal(rest, torch.ones_like(rest))
    assert torch.equal(still, torch.zeros_like(still))


def saved_with_scaling(config: PretrainedConfig, folder: Path, scaling: dict[str, Any], **more: Any) -> Path:
    """As transformers writes it, with its numbers in ``rope_parameters``; then ``rope_scaling`` added by hand."""
    config.architectures = [type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(raw | more | {"rope_scaling": scaling}))
    return folder


@pytest.mark.parametrize(
    ("scaling", "more"),
    [
        (YARN_ROPE | {"rope_theta": 1e6}, {}),
        (YARN_ROPE | {"rope_theta": 5e5}, {}),
        ({key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}, {"rope_theta": 1e6}),
    ],
    ids=["same base", "another base", "base of all"],
)
def test_a_scaling_added_by_hand_counts(tmp_path: Path, scaling: dict[str, Any], more: dict[str, Any]) -> None:
    """As the cards of Qwen's models ask for it, beside what transformers has saved."""
    saved = Qwen3Config(**SHAPE, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    folder = saved_with_scaling(saved, tmp_path, scaling, **more)
    ours, theirs = tables_of(AutoConfig.from_pretrained(folder), folder)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert ModelConfig.from_folder(folder).rope_scaling is not None


def test_a_scaling_added_by_hand_leaves_layers_with_a_window_alone(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**SHAPE, head_dim=16, layer_types=LAYER_TYPES)
    folder = saved_with_scaling(config, tmp_path, {"rope_type": "linear", "factor": 8.0})
    ours = rotary_caches(ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"))
    positions, theirs = torch.arange(len(ours[0]))[None], Gemma3RotaryEmbedding(AutoConfig.from_pretrained(folder))
    for table, kind in zip(ours, ("full_attention", "sliding_attention"), strict=True):
        cos, sin = (part[0, :, :8] for part in theirs(torch.zeros(1), positions, kind))
        torch.testing.assert_close(table, torch.cat((cos, sin), dim=1), atol=2e-5, rtol=1e-5)
    assert not torch.equal(*ours)


def test_a_base_that_a_scaling_added_by_hand_would_drop_is_refused(tmp_path: Path) -> None:
    """transformers goes on with the family's, and answers gibberish."""
    saved = Qwen3Config(**SHAPE, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    folder = saved_with_scaling(saved, tmp_path, {"rope_type": "yarn", "factor": 4.0})
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(
        ConfigError, match=r"rope_parameters in config\.json has rope_theta 1000000\.0, and rope_scaling"
    ):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize("theta", [None, 5.0])
def test_tables_are_as_large_as_planned(theta: float | None) -> None:
    model = make_model(head_size=16, max_model_len=100, sliding_window=8, window_rope_theta=theta)
    for dtype in (torch.float32, torch.bfloat16):
        tables = {table.data_ptr(): table for table in rotary_caches(model, dtype, torch.device("cpu"))}
        assert rotary_bytes(model, dtype.itemsize) == sum(table.nbytes for table in tables.values())
