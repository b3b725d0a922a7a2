"""Replicas exchange blocks only where they compute the same keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.model_configs import make_model

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, EngineConfig
from shoal_replica.fingerprint import PROBE_BYTES, fingerprint

SIZE = 8 * PROBE_BYTES
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def config(
    folder: Path, num_blocks: int = 1000, adapters: tuple[AdapterConfig, ...] = (), **fields: object
) -> EngineConfig:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    model = make_model(folder=str(folder), **fields)
    return EngineConfig(model=model, cache=CacheConfig(num_blocks=num_blocks), adapters=adapters)


def change_byte(config: EngineConfig, place: int) -> EngineConfig:
    with (Path(config.model.folder) / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    return config


def test_it_does_not_depend_on_the_place_of_the_files_or_the_size_of_the_pool(tmp_path: Path) -> None:
    here, there = config(tmp_path / "here"), config(tmp_path / "there", num_blocks=10)
    assert here.model.max_model_len != there.model.max_model_len
    assert fingerprint(here) == fingerprint(there)
    (tmp_path / "there" / "consolidated.safetensors").write_bytes(b"the same weights once more, which nobody reads")
    assert fingerprint(here) == fingerprint(there)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: config(folder, dtype="float32"),
        lambda folder: config(folder, rope_theta=5e5),
        lambda folder: config(folder, quantization="int8"),
        lambda folder: change_byte(config(folder), 0),
        lambda folder: change_byte(config(folder), SIZE // 2 + 5),
        lambda folder: change_byte(config(folder), SIZE - 1),
        lambda folder: config(
            folder, adapters=(AdapterConfig(name="legal", folder=str(folder), factors=(), num_values=0),)
        ),
    ],
)
def test_it_tells_what_changes_keys_and_values(change: Callable[[Path], EngineConfig], tmp_path: Path) -> None:
    assert fingerprint(change(tmp_path / "other")) != fingerprint(config(tmp_path / "one"))


def test_a_length_that_chooses_the_rotary_table_counts(tmp_path: Path) -> None:
    short, long = (config(tmp_path / "one", rope_scaling=LONG, max_model_len=length) for length in (512, 1024))
    assert fingerprint(short) != fingerprint(long)
