"""What is read of an adapter's folder, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.model_configs import make_model
from safetensors.numpy import save_file

from shoal_replica.adapter import PAGE_BYTES, adapter_bytes
from shoal_replica.adapter_folder import MAX_CONFIG_BYTES, MAX_RANK, read_adapter, read_adapters
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.moe_config import MoeConfig

MODEL = make_model(hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_size=8)
HIDDEN, INNER = MODEL.hidden_size, MODEL.intermediate_size
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def stored(module: str, rank: int, num_in: int, num_out: int) -> dict[str, tuple[int, ...]]:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": (rank, num_in), f"{name}.lora_B.weight": (num_out, rank)}


GOOD = stored(Q, 4, HIDDEN, HIDDEN) | stored(DOWN, 2, INNER, HIDDEN)


def write(folder: Path, shapes: dict[str, tuple[int, ...]], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def test_factors_ranks_and_scales(tmp_path: Path) -> None:
    adapter = read_adapter("a", write(tmp_path, GOOD), MODEL)
    assert {(f.module, f.rank, f.scale) for f in adapter.factors} == {(Q, 4, 2.0), (DOWN, 2, 4.0)}
    qkv = HIDDEN + 2 * MODEL.num_kv_heads * MODEL.head_size  # the product that the query projection is part of
    assert adapter.num_values == 32 * (HIDDEN + qkv) + 32 * (INNER + HIDDEN)  # ranks are held as multiples of 32
    assert adapter_bytes([adapter, adapter], 2) == 2 * (2 * adapter.num_values + PAGE_BYTES)


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({"use_rslora": True}, (4.0, 8 / 2**0.5)),
        ({"alpha_pattern": {"q_proj": 2}}, (0.5, 4.0)),
        ({"alpha_pattern": {"layers.1.mlp.down_proj": 1.0, "proj": 7}}, (2.0, 0.5)),
        ({"lora_alpha": 0.5}, (0.125, 0.25)),
        *(({"init_lora_weights": start}, (2.0, 4.0)) for start in (None, True, False, "gaussian", "eva", "orthogonal")),
    ],
    ids=str,
)
def test_scales_are_pefts(tmp_path: Path, changes: dict[str, Any], scales: tuple[float, float]) -> None:
    adapter = read_adapter("a", write(tmp_path, GOOD, **changes), MODEL)
    assert [f.scale for f in sorted(adapter.factors, key=lambda f: f.module)] == list(scales)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"adapters.a: peft_type in adapter_config.json is 'IA3'; only 'LORA' is supported"),
        ({"use_dora": True}, "use_dora in adapter_config.json is True, which is not supported"),
        *(
            ({"init_lora_weights": start}, f"init_lora_weights in adapter_config.json is '{start}', which changes")
            for start in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"bias": "all"}, "bias in adapter_config.json is 'all', which"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"an_option_of_2028": 1}, "an_option_of_2028 in adapter_config.json is 1, which is not supported"),
        ({"lora_alpha": "eight"}, "lora_alpha in adapter_config.json is 'eight'; must be a number up to 1e"),
        ({"lora_alpha": None}, "lora_alpha in adapter_config.json is None"),
        ({"lora_alpha": 10**400}, "lora_alpha in adapter_config.json is 1000.*; must be a number up to"),
        ({"lora_alpha": 1e39}, "must be a number up to"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern in adapter_config.json is .*; must be an object"),
        ({"alpha_pattern": {"*(": 1}}, r"'\*\(' in alpha_pattern is no pattern"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapter("a", write(tmp_path, GOOD, **changes), MODEL)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "holds no tensors"),
        (
            stored("model.embed_tokens", 4, HIDDEN, 8),
            "embed_tokens.lora_A.weight' adapts nothing that",
        ),
        (stored("lm_head", 4, HIDDEN, 8), "adapts nothing that can be adapted here"),
        (stored("model.layers.99.self_attn.q_proj", 4, HIDDEN, HIDDEN), "adapts nothing"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": (4,)}, "adapts nothing"),
        (stored(Q, 4, HIDDEN + 1, HIDDEN), r"has factors of shapes \(4, \d+\) and \(\d+, 4\); the model's is"),
        (stored(Q, 4, HIDDEN, HIDDEN - 1), "has factors of shapes"),
        ({f"base_model.model.{Q}.lora_A.weight": (4, HIDDEN)}, f"{Q} has only its factor A"),
        (stored(Q, 4, HIDDEN, HIDDEN) | {f"{Q}.lora_A.weight": (4, HIDDEN)}, "are the same factor"),
        ({f"{Q}.lora_A.weight": (), f"{Q}.lora_B.weight": (HIDDEN, 4)}, r"has factors of shapes \(\) and"),
        (stored(Q, MAX_RANK + 1, HIDDEN, HIDDEN), f"has rank {MAX_RANK + 1}; must be from 1 to {MAX_RANK}"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapter("a", write(tmp_path, shapes), MODEL)


@pytest.mark.parametrize("part", ["gate", "experts.0.up_proj", "shared_experts.up_proj"])
def test_mixtures_of_experts_cannot_be_adapted(tmp_path: Path, part: str) -> None:
    moe = MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        intermediate_size=INNER,
        renormalize=True,
        layers=(1,),
        shared_size=INNER,
    )
    folder = write(tmp_path, stored(f"model.layers.1.mlp.{part}", 4, HIDDEN, INNER))
    with pytest.raises(ConfigError, match=rf"{part}.* adapts nothing that can be adapted here"):
        read_adapter("a", folder, replace(MODEL, moe=moe))


def test_factors_of_another_kind_of_number_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, GOOD)
    tensors = {name: np.zeros(shape, np.int8) for name, shape in GOOD.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor '.*' is I8; must be one of F64, F32, F16, BF16"):
        read_adapter("a", folder, MODEL)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "é" * 129])
def test_names_that_cannot_be_asked_for_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="adapters: got the name"):
        read_adapters({name: str(write(tmp_path, GOOD))}, MODEL)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"adapters.a: '.*' holds no adapter_config.json"):
        read_adapter("a", tmp_path / "nowhere", MODEL)
    folder = write(tmp_path, GOOD)
    (folder / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter("a", folder, MODEL)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFound, match="holds no adapter_model"):
        read_adapter("a", folder, MODEL)
    write(tmp_path, GOOD)
    for text, message in (("[]", "does not hold a JSON object"), ("{", "is not JSON")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_adapter("a", folder, MODEL)
    with (folder / "adapter_config.json").open("r+b") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(ConfigError, match=f"has {MAX_CONFIG_BYTES + 1} bytes; at most {MAX_CONFIG_BYTES}"):
        read_adapter("a", folder, MODEL)


@pytest.mark.parametrize("change", [-1, 1, 2**31])
def test_a_file_of_another_length_than_its_header_says(tmp_path: Path, change: int) -> None:
    folder = write(tmp_path, GOOD)
    os.truncate(folder / "adapter_model.safetensors", (folder / "adapter_model.safetensors").stat().st_size + change)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter("a", folder, MODEL)
