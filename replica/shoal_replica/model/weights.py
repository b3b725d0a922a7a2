"""Read a Hugging Face checkpoint, or a rank's part of it, into packed parameters, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal_replica.config import ModelConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.model.parameters import Piece, parameters
from shoal_replica.shard import Shard, whole_shard

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_weights(config: ModelConfig, device: torch.device, shard: Shard | None = None) -> dict[str, Tensor]:
    """Parameters of a rank by packed name (see ``parameters``), in the config's dtype, on ``device``.

    Only the rank's pieces are read from the files. Memory peaks at the parameters plus one piece.

    Args:
        shard: None loads the whole model.

    Raises:
        NotFound: the folder holds no safetensors weights.
        ConfigError: a tensor is missing, unexpected or of another shape than config.json says, or a file is damaged.
    """
    dtype = DTYPES[config.dtype]
    weights: dict[str, Tensor] = {}
    places: dict[str, tuple[Piece, Tensor]] = {}
    for parameter in parameters(config, shard or whole_shard(config)):
        packed = weights[parameter.name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        targets = torch.split(packed, [len(piece.rows) for piece in parameter.pieces])
        places.update({piece.name: (piece, target) for piece, target in zip(parameter.pieces, targets, strict=True)})
    missing = {piece.name for parameter in parameters(config, whole_shard(config)) for piece in parameter.pieces}
    for name, stored in _stored_tensors(Path(config.folder)):
        if _is_redundant(name, config):
            continue
        if name not in missing:
            raise ConfigError(f"model: unexpected tensor {name!r} in {config.folder}")
        missing.remove(name)
        if name in places:
            piece, target = places[name]
            _fill(target, piece, stored)
    if missing:
        raise ConfigError(f"model: tensor {min(missing)!r} is missing in {config.folder} ({len(missing)} missing)")
    if config.tie_word_embeddings and "embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    return weights


def _fill(target: Tensor, piece: Piece, stored: Any) -> None:
    """Read ``piece`` of an open safetensors slice into ``target``."""
    shape = tuple(stored.get_shape())
    if shape != piece.shape:
        raise ConfigError(f"model: tensor {piece.name!r} has shape {shape}; config.json asks for {piece.shape}")
    rows = slice(piece.rows.start, piece.rows.stop)
    if not target.numel():
        return
    if piece.columns is None:
        target.copy_(stored[rows])
    else:
        target.copy_(stored[rows, piece.columns.start : piece.columns.stop])


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Some checkpoints store what follows from the config: rotary frequencies, or the tied embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and open slice of every tensor; nothing is read before the slice is indexed."""
    for path in _weight_files(folder):
        if not path.is_file():
            raise NotFound(f"model: {path} is named in {INDEX_FILE} but is not there")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    yield name, file.get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"model: {path} cannot be read: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"model: {index} is not a safetensors index") from None
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise NotFound(f"model: {str(folder)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
