"""A rank's share of an adapter's weights, and how the torch operators apply them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from shoal_replica.adapter import WEIGHTS_FILE, AdapterConfig, Factors
from shoal_replica.adapter_folder import copied
from shoal_replica.errors import ConfigError
from shoal_replica.model.parameters import Piece, parameters
from shoal_replica.model.weights import DTYPES
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import Shard


class LoraPair(NamedTuple):
    """What an adapter adds to a packed product, y = x W^T: (x down^T) up^T. The scale is part of ``up``.

    down [rank, in_size], up [out_size, rank], where ``rank`` is the sum of those of the product's projections.
    """

    down: Tensor
    up: Tensor


def read_adapter(
    adapter: AdapterConfig, model: ModelConfig, shard: Shard, device: torch.device
) -> Iterator[tuple[str, LoraPair]]:
    """The pairs of a rank's products with their packed names (``layers.{i}.qkv_proj``), in the model's dtype.

    Of a product whose inputs are spread over the ranks, each rank has the columns of ``down`` for its own, so that the
    sum over the ranks adds up its part too.

    Raises:
        ConfigError: a factor is NaN or infinite, which would end the engine with the first request.
    """
    factors = {f"{f.module}.weight": f for f in adapter.factors}
    with copied(Path(adapter.folder) / WEIGHTS_FILE) as copy, safe_open(copy, framework="pt") as file:
        for parameter in parameters(model, shard):
            own = {piece.name: factors[piece.name] for piece in parameter.pieces if piece.name in factors}
            if own:
                pair = _stack(file, parameter.pieces, own)
                name, held = parameter.name.removesuffix(".weight"), [side.to(DTYPES[model.dtype]) for side in pair]
                if not all(side.isfinite().all() for side in held):
                    raise ConfigError(
                        f"adapters.{adapter.title}: the factors of {name} are not finite in {model.dtype}"
                    )
                yield name, LoraPair(*(side.to(device) for side in held))


def _stack(file: Any, pieces: Sequence[Piece], factors: Mapping[str, Factors]) -> LoraPair:
    """One pair for projections that share a product: each has ranks of its own, with zeros for the others' outputs.

    Args:
        file: the adapter's open weights.
        factors: by the names of stored tensors, those of the pieces that are adapted.
    """
    columns = pieces[0].columns
    assert columns is not None
    downs = {name: file.get_slice(own.down)[:, columns.start : columns.stop].float() for name, own in factors.items()}
    ends = list(accumulate(len(down) for down in downs.values()))
    ranks = {name: slice(end - len(down), end) for (name, down), end in zip(downs.items(), ends, strict=True)}
    up, row = torch.zeros(sum(len(piece.rows) for piece in pieces), ends[-1]), 0
    for piece in pieces:
        if (own := factors.get(piece.name)) is not None:
            rows = file.get_slice(own.up)[piece.rows.start : piece.rows.stop]
            up[row : row + len(piece.rows), ranks[piece.name]] = rows.float() * own.scale
        row += len(piece.rows)
    return LoraPair(torch.cat(list(downs.values())), up)


class StepAdapters:
    """The adapters of a step's rows.

    Args:
        runs: rows [begin, end) and the pairs of their adapter.
    """

    def __init__(self, runs: Sequence[tuple[int, int, dict[str, LoraPair]]]) -> None:
        self._runs = runs

    def add(self, out: Tensor, x: Tensor, name: str) -> None:
        """Add to ``out`` [T, out_size] what the adapters add to the product ``name`` of x [T, in_size]."""
        for begin, end, pairs in self._runs:
            if (pair := pairs.get(name)) is not None:
                out[begin:end] += (x[begin:end] @ pair.down.T) @ pair.up.T


def step_adapters(
    names: Sequence[str], query_start_loc: Sequence[int], held: dict[str, dict[str, LoraPair]]
) -> StepAdapters | None:
    """The adapters of a step whose sequences have these ``names``, "" for none; neighbours of one name are one run.
    None if no sequence has one.
    """
    runs: list[tuple[int, int, dict[str, LoraPair]]] = []
    last = ""
    for i, name in enumerate(names):
        begin, end = query_start_loc[i], query_start_loc[i + 1]
        if name and name == last:
            runs[-1] = (runs[-1][0], end, held[name])
        elif name:
            runs.append((begin, end, held[name]))
        last = name
    return StepAdapters(runs) if runs else None
