"""What decides the keys and values that a model computes, as a short digest."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from shoal_replica.checkpoint import weight_files
from shoal_replica.config import EngineConfig

PROBE_BYTES = 2**16
ADAPTER_FILES = "*.safetensors"


def fingerprint(config: EngineConfig) -> str:
    """Equal for engines that compute the same keys and values: the model's shape, dtype and rotary embedding, and the
    weights of model and adapters. Of a file of weights only size, beginning, middle and end are read.
    """
    model = config.model
    length = model.max_model_len if model.rope_scaling else 0  # it may choose a table; else pools may differ in size
    digest = blake2b(repr(replace(model, folder="", max_model_len=length)).encode(), digest_size=16)
    of_adapters = [sorted(Path(adapter.folder).glob(ADAPTER_FILES)) for adapter in config.adapters]
    for path in chain(weight_files(Path(model.folder)), *of_adapters):
        digest.update(_probe(path))
    digest.update(repr([adapter.name for adapter in config.adapters]).encode())
    return digest.hexdigest()


def _probe(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = [path.name.encode(), str(size).encode()]
        for start in (0, size // 2, max(0, size - PROBE_BYTES)):
            file.seek(start)
            parts.append(file.read(PROBE_BYTES))
    return b"".join(parts)
