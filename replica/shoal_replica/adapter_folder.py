"""Reads what an adapter's folder says, in PEFT's format, and checks it against the model. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal_replica.adapter import NAME_PATTERN, RANK_UNIT, WEIGHTS_FILE, AdapterConfig, Factors
from shoal_replica.errors import ConfigError, NotFound, shown
from shoal_replica.model.parameters import parameters
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import whole_shard

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 100 * 10**6  # safetensors' own limit
COPY_BYTES = 2**20
MAX_RANK = 512
MAX_ALPHA = 1e6
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# What may be in adapter_config.json: these say nothing that changes the answers beyond the factors and their scale.
HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
# How training began, where that leaves the model's own weights as they are. PEFT changes these for the others (PiSSA,
# OLoRA, CorDA, LoftQ, LoRA-GA), also when it loads the adapter.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def read_adapters(folders: Mapping[str, str], model: ModelConfig) -> tuple[AdapterConfig, ...]:
    """``read_adapter`` of each name and folder. Raises ConfigError also for a name that cannot be asked for."""
    for name in folders:
        if re.fullmatch(NAME_PATTERN, name) is None:
            raise ConfigError(f"adapters: got the name {name!r}; must be 1 to 128 letters, digits and . _ : / -")
    return tuple(read_adapter(name, folder, model) for name, folder in folders.items())


def read_adapter(name: str, folder: str | Path, model: ModelConfig) -> AdapterConfig:
    """Read ``adapter_config.json`` and the header of ``adapter_model.safetensors``.

    Raises:
        NotFound: no such folder, or a file is missing.
        ConfigError: it is no LoRA adapter of this model, or uses what is not supported; the adapter is named.
    """
    path = Path(folder).expanduser()
    raw = _read_config(name, path)
    _refuse_unsupported(name, raw)
    shapes = _read_shapes(name, path / WEIGHTS_FILE)
    sizes = _adaptable(model)
    sides: dict[str, dict[str, str]] = {}
    named: dict[str, str] = {}  # as the adapter has it
    for tensor in shapes:
        match = FACTOR.fullmatch(tensor)
        module = (model.text_name(match["module"]) or match["module"]) if match is not None else ""
        if match is None or module not in sizes:
            adapted = dict.fromkeys(module.rpartition(".")[2] for module in sizes)
            raise ConfigError(
                f"adapters.{name}: tensor {tensor!r} adapts nothing that can be adapted here: "
                f"{', '.join(adapted)} of the model's {model.num_layers} layers"
            )
        named[module] = match["module"]
        pair = sides.setdefault(module, {})
        if (other := pair.setdefault(match["side"], tensor)) != tensor:
            raise ConfigError(f"adapters.{name}: tensors {other!r} and {tensor!r} are the same factor")
    factors = tuple(
        _factors(name, module, named[module], pair, shapes, sizes[module], raw) for module, pair in sides.items()
    )
    if not factors:
        raise ConfigError(f"adapters.{name}: {path / WEIGHTS_FILE} holds no tensors")
    ranks = {f.module: f.rank for f in factors}
    num_values = sum(
        _padded(sum(ranks.get(module, 0) for module in modules)) * (num_in + num_out)
        for modules, num_out, num_in in _products(model)
    )
    return AdapterConfig(name=name, folder=str(path), factors=factors, num_values=num_values)


@contextmanager
def copied(weights: Path, *, header_only: bool = False) -> Iterator[str]:
    """The path of a copy of a safetensors file in memory; of its header alone, the rest takes no memory.

    The library maps what it reads, and a process that reads a mapped file ends by SIGBUS if somebody cuts the file
    short meanwhile, as ``cp`` does before it writes.
    """
    with weights.open("rb") as file, os.fdopen(os.memfd_create("shoal-adapter"), "w+b") as copy:
        if header_only:
            length = file.read(8)
            copy.write(length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
            copy.truncate(os.fstat(file.fileno()).st_size)
        else:
            shutil.copyfileobj(file, copy, COPY_BYTES)
        copy.flush()
        yield f"/proc/self/fd/{copy.fileno()}"


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise NotFound(f"adapters.{name}: {str(folder)!r} holds no {file}")
    if (size := (folder / CONFIG_FILE).stat().st_size) > MAX_CONFIG_BYTES:
        raise ConfigError(f"adapters.{name}: {folder / CONFIG_FILE} has {size} bytes; at most {MAX_CONFIG_BYTES}")
    try:
        raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"adapters.{name}: {folder / CONFIG_FILE} is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"adapters.{name}: {folder / CONFIG_FILE} does not hold a JSON object")
    return raw


def _refuse_unsupported(name: str, raw: Mapping[str, Any]) -> None:
    """Refuse whatever is not known to be harmless: PEFT's options grow, and one that was ignored would show as answers
    that are slightly wrong.
    """
    if (kind := raw.get("peft_type")) != "LORA":
        raise ConfigError(f"adapters.{name}: peft_type in {CONFIG_FILE} is {kind!r}; only 'LORA' is supported")
    if (start := raw.get("init_lora_weights")) not in PLAIN_STARTS:
        raise ConfigError(
            f"adapters.{name}: init_lora_weights in {CONFIG_FILE} is {shown(start)}, which changes the model itself; "
            "convert it: PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for key, value in raw.items():
        if key not in HARMLESS | {"peft_type", "init_lora_weights"} and value not in (None, False, "none", [], {}):
            raise ConfigError(f"adapters.{name}: {key} in {CONFIG_FILE} is {shown(value)}, which is not supported")


def _read_shapes(name: str, path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with copied(path, header_only=True) as copy, safe_open(copy, framework="np") as file:
            names = file.keys()  # a safetensors file is not a Mapping
            slices = {tensor: file.get_slice(tensor) for tensor in names}
            for tensor, held in slices.items():
                if (dtype := held.get_dtype()) not in DTYPES:
                    raise ConfigError(
                        f"adapters.{name}: tensor {tensor!r} is {dtype}; must be one of {', '.join(DTYPES)}"
                    )
            return {tensor: tuple(held.get_shape()) for tensor, held in slices.items()}
    except SafetensorError as error:
        raise ConfigError(f"adapters.{name}: {path} cannot be read: {error}") from None


def _products(model: ModelConfig) -> list[tuple[tuple[str, ...], int, int]]:
    """The packed products that can be adapted: their projections, and their numbers of outputs and inputs."""
    found: list[tuple[tuple[str, ...], int, int]] = []
    for parameter in parameters(model, whole_shard(model)):
        modules = tuple(dict.fromkeys(piece.name.removesuffix(".weight") for piece in parameter.pieces))
        is_of_mixture = ".experts." in parameter.name or ".shared_mlp." in parameter.name
        if parameter.name.endswith("_proj.weight") and not is_of_mixture:
            num_out, num_in = parameter.shape
            found.append((modules, num_out, num_in))
    return found


def _adaptable(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The projections that can be adapted, by stored name, with their shapes."""
    adaptable = {module for modules, *_ in _products(model) for module in modules}
    pieces = (piece for parameter in parameters(model, whole_shard(model)) for piece in parameter.pieces)
    named = ((piece.name.removesuffix(".weight"), piece.shape) for piece in pieces)
    return {module: shape for module, shape in named if module in adaptable and len(shape) > 1}


def _factors(
    name: str,
    module: str,
    stored: str,
    pair: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    size: tuple[int, ...],
    raw: Mapping[str, Any],
) -> Factors:
    if pair.keys() != {"A", "B"}:
        raise ConfigError(f"adapters.{name}: {module} has only its factor {min(pair)}")
    down, up = shapes[pair["A"]], shapes[pair["B"]]
    rank = down[0] if down else 0
    if (down, up) != ((rank, size[1]), (size[0], rank)):
        raise ConfigError(
            f"adapters.{name}: {module} has factors of shapes {down} and {up}; the model's is {size}, so they must be "
            f"(rank, {size[1]}) and ({size[0]}, rank)"
        )
    if not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"adapters.{name}: {module} has rank {rank}; must be from 1 to {MAX_RANK}")
    return Factors(module, rank, _scale(name, stored, rank, raw), pair["A"], pair["B"])


def _scale(name: str, module: str, rank: int, raw: Mapping[str, Any]) -> float:
    """PEFT's scale: alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters (Kalajdzievski 2023)."""
    alpha, patterns = raw.get("lora_alpha"), raw.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"adapters.{name}: alpha_pattern in {CONFIG_FILE} is {patterns!r}; must be an object")
    for pattern, value in patterns.items():
        try:
            is_meant = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise ConfigError(f"adapters.{name}: {pattern!r} in alpha_pattern is no pattern: {error}") from None
        if is_meant:
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise ConfigError(
            f"adapters.{name}: lora_alpha in {CONFIG_FILE} is {shown(alpha)}; must be a number up to {MAX_ALPHA:g}"
        )
    return alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _padded(rank: int) -> int:
    return -(-rank // RANK_UNIT) * RANK_UNIT
