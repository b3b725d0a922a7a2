"""Reads a Hugging Face checkpoint, or a rank's part of it, into packed parameters, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal_kernels.integers import IntegerWeight, joined
from shoal_replica.checkpoint import INDEX_FILE, weight_files
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.model.parameters import EMBEDDING, HEAD, Piece, parameters
from shoal_replica.model.quantized_pieces import KV_SCALES, QuantizedPieces, is_quantized, matrix_of
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard, whole_shard

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WORD_BYTES = 4


def load_weights(config: ModelConfig, device: torch.device, shard: Shard | None = None) -> dict[str, Tensor]:
    """All parameters of ``stream_weights`` at once, integers widened; tied tables are one tensor."""
    dtype = DTYPES[config.dtype]
    return {
        name: weight.widen(dtype).to(device) if isinstance(weight, IntegerWeight) else weight
        for name, weight in stream_weights(config, device, shard)
    }


def stream_weights(
    config: ModelConfig, device: torch.device, shard: Shard | None = None, *, lends_file: bool = False
) -> Iterator[tuple[str, Tensor | IntegerWeight]]:
    """The parameters of a rank with their packed names (see ``parameters``), in the config's dtype, on ``device``; or
    as integers, in host memory, where the checkpoint has them quantized; or in float32, where it has them less one, or
    every bit counts.

    Each is read when the iterator reaches it, and only the rank's pieces of it, so that a caller that repacks them
    never holds two models. Of tied tables the second follows the first, and is the same tensor.

    Args:
        shard: None loads the whole model.
        lends_file: whether a parameter may be a view of the file's own pages, valid until the next one is asked for.

    Raises:
        NotFound: the folder holds no safetensors weights.
        ConfigError: a tensor is missing, unexpected or of another shape than config.json says, or a file is damaged.
    """
    dtype = DTYPES[config.dtype]
    with ExitStack() as files:
        stored = _stored_tensors(config, files)
        quantized = QuantizedPieces(config.stored, config.quantization, stored) if config.stored else None

        def read(piece: Piece) -> Tensor | IntegerWeight:
            if quantized is not None and is_quantized(piece.name, stored):
                return quantized.read(piece)
            return _view(piece, stored[piece.name].get_slice(piece.name))

        for parameter in parameters(config, shard or whole_shard(config)):
            first = read(parameter.pieces[0])
            packed: Tensor | IntegerWeight
            if isinstance(first, IntegerWeight) and all(is_quantized(piece.name, stored) for piece in parameter.pieces):
                rest = [cast(IntegerWeight, read(piece)) for piece in parameter.pieces[1:]]
                packed = joined([first, *rest])
            elif parameter.adds_one or parameter.is_exact:
                packed = _widened(first).to(device, torch.float32) + float(parameter.adds_one)
            elif lends_file and len(parameter.pieces) == 1 and _is_ready(plain := _widened(first), dtype, device):
                packed = plain
            else:
                packed = torch.empty(parameter.shape, dtype=dtype, device=device)
                targets = torch.split(packed, [len(piece.rows) for piece in parameter.pieces])
                targets[0].copy_(_widened(first))
                for piece, target in zip(parameter.pieces[1:], targets[1:], strict=True):
                    target.copy_(_widened(read(piece)))
            yield parameter.name, packed
            if parameter.name == EMBEDDING and config.tie_word_embeddings:
                yield HEAD, packed


class _TextPart:
    """A file of a model with several parts, by the names that the tensors of its decoder for text have alone."""

    def __init__(self, file: Any, config: ModelConfig) -> None:
        self._file = file
        names = file.keys()  # it is not a Mapping
        self._stored_names = {own: name for name in names if (own := config.text_name(name)) is not None}

    def keys(self) -> Iterable[str]:
        return self._stored_names

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._stored_names[name])

    def get_tensor(self, name: str) -> Tensor:
        return cast(Tensor, self._file.get_tensor(self._stored_names[name]))


def _widened(piece: Tensor | IntegerWeight) -> Tensor:
    return piece.widen(torch.float32) if isinstance(piece, IntegerWeight) else piece


def _view(piece: Piece, stored: Any) -> Tensor:
    """``piece`` of an open safetensors slice: mapped pages of the file, which are read on first access."""
    shape = tuple(stored.get_shape())
    if shape != piece.shape:
        raise ConfigError(f"model: tensor {piece.name!r} has shape {shape}; config.json asks for {piece.shape}")
    if len(shape) == 3:
        matrices = stored[piece.rows.start // shape[1] : piece.rows.stop // shape[1]]
        return cast(Tensor, matrices.flatten(0, 1))
    rows = slice(piece.rows.start, piece.rows.stop)
    if piece.columns is None:
        return cast(Tensor, stored[rows])
    return cast(Tensor, stored[rows, piece.columns.start : piece.columns.stop])


def _is_ready(view: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``view`` can be used as it is. Files guarantee no alignment, and packing reads a matrix by words."""
    return (view.dtype, view.device) == (dtype, device) and view.data_ptr() % WORD_BYTES == 0


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not needed: some checkpoints store rotary frequencies, a tied embedding twice, or layers
    behind the last.
    """
    first, end = config.num_layers, config.num_layers + config.num_extra_layers
    if any(name.startswith(f"model.layers.{layer}.") for layer in range(first, end)):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and matrix_of(name) == HEAD)


def _is_idle(name: str, stored: dict[str, Any]) -> bool:
    """Whether a tensor of a quantized checkpoint changes nothing here: a scale of KV, which keeps the dtype, or one of
    the biases of zeros that GPTQ's tools add to projections that have none.
    """
    return name.endswith(KV_SCALES) or (name.endswith(".bias") and not stored[name].get_tensor(name).any().item())


def _stored_tensors(config: ModelConfig, files: ExitStack) -> dict[str, Any]:
    """The open file of every tensor of the model; only headers have been read. ``files`` closes them."""
    missing = {piece.name for parameter in parameters(config, whole_shard(config)) for piece in parameter.pieces}
    stored: dict[str, Any] = {}
    for path in weight_files(Path(config.folder)):
        if not path.is_file():
            raise NotFound(f"model: {path} is named in {INDEX_FILE} but is not there")
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ConfigError(f"model: {path} cannot be read: {error}") from None
        part = _TextPart(file, config) if config.text_prefixes else file
        names = part.keys()  # a safetensors file is not a Mapping
        stored.update({name: part for name in names if not _is_redundant(name, config)})
    unexpected = stored.keys() - missing
    if config.stored is not None:
        unexpected = {name for name in unexpected if matrix_of(name) not in missing}
        unexpected = {name for name in unexpected if not _is_idle(name, stored)}
    if unexpected:
        raise ConfigError(f"model: unexpected tensor {min(unexpected)!r} in {config.folder}")
    if missing := {name for name in missing - stored.keys() if not is_quantized(name, stored)}:
        raise ConfigError(f"model: tensor {min(missing)!r} is missing in {config.folder} ({len(missing)} missing)")
    return stored
