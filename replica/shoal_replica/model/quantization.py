"""Rounds a decoder's matrices to the integer formats of ``shoal_kernels.integers`` while they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shoal_kernels.integers import GROUP_SIZE, IntegerWeight, round_weight
from shoal_replica.errors import ConfigError
from shoal_replica.model.parameters import EMBEDDING, HEAD
from shoal_replica.model_config import ModelConfig
from shoal_replica.weight_formats import ACTIVATION_BITS, LAYER_BITS

TABLES = (EMBEDDING, HEAD)
TABLE_BITS = 8  # embedding and head lose more than the layers, and are read a row at a time, or once per step


def quantize(
    config: ModelConfig, weights: Iterable[tuple[str, Tensor | IntegerWeight]]
) -> Iterator[tuple[str, Tensor | IntegerWeight]]:
    """``weights`` with projections, embedding and head rounded as ``config.quantization`` says; norms, biases and
    routers stay as they are. So does all else of a checkpoint that is quantized: what is plain there stays plain.

    One by one, as they come. Of tied tables the second must follow the first; they are rounded once.

    Raises:
        ConfigError: a matrix's inputs, or this rank's share of them, are not a multiple of ``GROUP_SIZE``.
    """
    layer_bits = LAYER_BITS[config.quantization] if config.stored is None else None
    last: Tensor | IntegerWeight | None = None
    rounded: Tensor | IntegerWeight | None = None
    for name, weight in weights:
        if weight is not last or rounded is None:
            bits = TABLE_BITS if name in TABLES else layer_bits if name.endswith("_proj.weight") else None
            rounded = weight
            if isinstance(weight, Tensor) and layer_bits is not None and bits is not None:
                rounded = _round(config, name, weight, bits)
            if isinstance(rounded, IntegerWeight) and name not in TABLES:
                # Rows for the head keep 16 bits, for they decide between tokens.
                rounded = replace(rounded, activation_bits=ACTIVATION_BITS.get(config.quantization, 16))
        last = weight
        yield name, rounded


def widen(weights: Iterable[tuple[str, Tensor | IntegerWeight]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """``weights`` as plain matrices again, for operators that take nothing else: same results, but no memory saved.

    Tied tables stay one tensor, if they come in the order of ``quantize``.
    """
    last: Tensor | IntegerWeight | None = None
    plain: Tensor | None = None
    for name, weight in weights:
        if weight is not last or plain is None:
            plain = weight.widen(dtype) if isinstance(weight, IntegerWeight) else weight
        last = weight
        yield name, plain


def _round(config: ModelConfig, name: str, weight: Tensor, bits: int) -> IntegerWeight:
    if weight.shape[1] % GROUP_SIZE:
        raise ConfigError(
            f"quantization: {name} has {weight.shape[1]} inputs here; {config.quantization} takes multiples of "
            f"{GROUP_SIZE}"
        )
    return round_weight(weight, bits)
