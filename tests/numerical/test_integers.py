"""Rounding to integer formats: how far a weight may move, and what cannot be rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_checkpoint

from shoal_kernels import integers
from shoal_kernels.integers import GROUP_SIZE, IntegerWeight, round_weight
from shoal_replica import weight_formats
from shoal_replica.errors import ConfigError
from shoal_replica.model.quantization import quantize
from shoal_replica.model.weights import load_weights, stream_weights
from shoal_replica.model_config import ModelConfig


@pytest.mark.parametrize("bits", [8, 4])
@given(seed=st.integers(0, 2**31), spread=st.floats(1e-6, 1e4), shift=st.floats(-10, 10), groups=st.integers(1, 4))
@settings(max_examples=50)
def test_a_weight_moves_by_little_more_than_half_a_step(
    bits: int, seed: int, spread: float, shift: float, groups: int
) -> None:
    weight = (torch.randn(5, groups * GROUP_SIZE, generator=torch.Generator().manual_seed(seed)) + shift) * spread
    held = round_weight(weight, bits)
    moved = (held.widen(torch.float32) - weight).abs().view(5, groups, GROUP_SIZE)
    # bf16 scales and minimums have a relative error of at most 2^-8, which the outermost values feel in full.
    slack = weight.abs().view(5, groups, GROUP_SIZE).amax(-1) * 2 * 2**-8
    assert (moved.amax(-1) <= held.scales.float().abs() / 2 + slack).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_one_value(bits: int) -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.5
    held = round_weight(weight, bits)
    widened = held.widen(torch.float32)
    assert torch.equal(widened[0], weight[0])
    torch.testing.assert_close(widened[1], weight[1], rtol=2**-8, atol=0.0)


def test_what_was_rounded_before_stays() -> None:
    values = torch.randint(16, (7, 4, GROUP_SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values[..., 0], values[..., 1] = 0, 15
    held = IntegerWeight(
        4, values.view(7, -1), torch.full((7, 4), 0.25).bfloat16(), torch.full((7, 4), -2.0).bfloat16()
    )
    again = round_weight(held.widen(torch.float32), 4)
    assert torch.equal(again.values, held.values)
    assert torch.equal(again.widen(torch.float32), held.widen(torch.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_large_weights_are_rounded_in_pieces(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(2))
    whole = round_weight(weight, bits)
    monkeypatch.setattr(integers, "PIECE", 5 * 64)
    pieces = round_weight(weight, bits)
    assert torch.equal(pieces.values, whole.values)
    assert torch.equal(pieces.scales, whole.scales)
    assert (pieces.minimums is None) == (whole.minimums is None)
    assert pieces.minimums is None or torch.equal(pieces.minimums, whole.minimums)


def test_what_cannot_be_rounded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bits: got 5"):
        round_weight(torch.zeros(2, 64), 5)
    with pytest.raises(ValueError, match="multiple of 32"):
        round_weight(torch.zeros(2, 40), 8)
    config = ModelConfig.from_folder(make_checkpoint("llama-llama3-rope", tmp_path), quantization="int8")
    weights = load_weights(config, torch.device("cpu"))
    weights["layers.0.down_proj.weight"] = weights["layers.0.down_proj.weight"][:, :40]
    with pytest.raises(ConfigError, match=r"layers\.0\.down_proj\.weight has 40 inputs"):
        dict(quantize(config, weights.items()))
    with pytest.raises(ConfigError, match="quantization: got 'int3'"):
        ModelConfig.from_folder(config.folder, quantization="int3")


def test_norms_biases_and_a_tied_table(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_checkpoint("qwen2", tmp_path), quantization="int4")
    rounded = dict(quantize(config, stream_weights(config, torch.device("cpu"))))
    kinds = {name: w.bits if isinstance(w, IntegerWeight) else None for name, w in rounded.items()}
    for name, bits in kinds.items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            assert bits == 8
        else:
            assert bits == (4 if name.endswith("_proj.weight") else None), name
    assert (rounded["embed_tokens.weight"] is rounded["lm_head.weight"]) == config.tie_word_embeddings
    plain = ModelConfig.from_folder(config.folder)
    assert config.weight_bytes < plain.weight_bytes / 2


def test_stored_groups_are_those_of_the_kernels():
    assert weight_formats.GROUP_SIZE == GROUP_SIZE
