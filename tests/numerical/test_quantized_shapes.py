"""Only matrices are read in quantized form; what else a checkpoint has so is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from shoal_replica.errors import ConfigError
from shoal_replica.model.weights import load_weights
from shoal_replica.model_config import ModelConfig


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("granite-moe", "model.layers.0.block_sparse_moe.input_linear.weight", (6, 96, 64)),
        ("llama", "model.norm.weight", (64,)),
    ],
    ids=["stacked experts", "a norm"],
)
def test_what_is_no_matrix_is_not_read_in_8_bits(
    tmp_path: Path, family: str, name: str, shape: tuple[int, ...]
) -> None:
    folder = make_checkpoint(family, tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert stored[name].shape == shape
    scale = stored[name].abs().amax() / 448
    stored |= {name: (stored[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(1)}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    complaint = re.escape(f"tensor {name!r} of shape {shape} is quantized; only matrices may be")
    with pytest.raises(ConfigError, match=complaint):
        load_weights(ModelConfig.from_folder(folder), torch.device("cpu"))
