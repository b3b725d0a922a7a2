"""Read a Hugging Face checkpoint into packed parameters, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal_replica.config import ModelConfig
from shoal_replica.errors import ConfigError, NotFound

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A packed parameter: the stored tensors ``parts`` (name, rows), laid one under the other."""

    name: str
    parts: tuple[tuple[str, int], ...]
    num_columns: int | None  # None for a vector

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows = sum(rows for _, rows in self.parts)
        return (num_rows,) if self.num_columns is None else (num_rows, self.num_columns)


def load_weights(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """Parameters of the decoder by packed name (see ``parameters``), in the config's dtype, on ``device``.

    Memory peaks at the parameters plus one stored tensor.

    Raises:
        NotFound: the folder holds no safetensors weights.
        ConfigError: a tensor is missing, unexpected or of another shape than config.json says, or a file is damaged.
    """
    dtype = DTYPES[config.dtype]
    weights: dict[str, Tensor] = {}
    place: dict[str, Tensor] = {}
    for parameter in parameters(config):
        packed = weights[parameter.name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        names, rows = zip(*parameter.parts, strict=True)
        place.update(zip(names, torch.split(packed, list(rows)), strict=True))
    for name, tensor in _stored_tensors(Path(config.folder)):
        if _is_redundant(name, config):
            continue
        target = place.pop(name, None)
        if target is None:
            raise ConfigError(f"model: unexpected tensor {name!r} in {config.folder}")
        if target.shape != tensor.shape:
            raise ConfigError(
                f"model: tensor {name!r} has shape {tuple(tensor.shape)}; config.json asks for {tuple(target.shape)}"
            )
        target.copy_(tensor)
    if place:
        raise ConfigError(f"model: tensor {min(place)!r} is missing in {config.folder} ({len(place)} missing)")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    return weights


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every packed parameter of the decoder; those of layer i are named ``layers.{i}.…``."""
    hidden, head = config.hidden_size, config.head_size
    query, kv = config.num_heads * head, config.num_kv_heads * head
    yield Parameter("embed_tokens.weight", (("model.embed_tokens.weight", config.vocab_size),), hidden)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _packed(prefix, "", norm, "weight", ((norm, hidden),), None)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield _packed(prefix, "self_attn.", norm, "weight", ((norm, head),), None)
        qkv = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        gate_up = (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size))
        for module, name, parts, num_columns, has_bias in (
            ("self_attn.", "qkv_proj", qkv, hidden, config.qkv_bias),
            ("self_attn.", "o_proj", (("o_proj", hidden),), query, config.output_bias),
            ("mlp.", "gate_up_proj", gate_up, hidden, config.mlp_bias),
            ("mlp.", "down_proj", (("down_proj", hidden),), config.intermediate_size, config.mlp_bias),
        ):
            yield _packed(prefix, module, name, "weight", parts, num_columns)
            if has_bias:
                yield _packed(prefix, module, name, "bias", parts, None)
    yield Parameter("norm.weight", (("model.norm.weight", hidden),), None)
    if not config.tie_word_embeddings:
        yield Parameter("lm_head.weight", (("lm_head.weight", config.vocab_size),), hidden)


def _packed(
    prefix: str, module: str, name: str, kind: str, parts: tuple[tuple[str, int], ...], num_columns: int | None
) -> Parameter:
    stored = tuple((f"model.{prefix}{module}{part}.{kind}", rows) for part, rows in parts)
    return Parameter(f"{prefix}{name}.{kind}", stored, num_columns)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Some checkpoints store what follows from the config: rotary frequencies, or the tied embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(folder):
        if not path.is_file():
            raise NotFound(f"model: {path} is named in {INDEX_FILE} but is not there")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    yield name, file.get_tensor(name)
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
