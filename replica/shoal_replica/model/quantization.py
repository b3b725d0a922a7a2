"""Rounds a loaded decoder's matrices to the integer formats of ``shoal_kernels.integers``."""

from __future__ import annotations

from torch import Tensor

from shoal_kernels.integers import GROUP_SIZE, IntegerWeight, round_weight
from shoal_replica.config import LAYER_BITS, ModelConfig
from shoal_replica.errors import ConfigError

TABLES = ("embed_tokens.weight", "lm_head.weight")
TABLE_BITS = 8  # embedding and head lose more than the layers do, and are read a row at a time, or once a step


def quantize(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor | IntegerWeight]:
    """``weights`` with projections, embedding and head as ``config.quantization`` says; norms, biases and routers stay.

    Empties ``weights`` on the way, so that memory peaks at one matrix more than both together.

    Raises:
        ConfigError: a matrix whose inputs, or whose share of them on this rank, are no multiple of ``GROUP_SIZE``.
    """
    bits = LAYER_BITS[config.quantization]
    if bits is None:
        return {**weights}
    rounded: dict[str, Tensor | IntegerWeight] = {}
    if weights.get(TABLES[0]) is weights.get(TABLES[1]):  # tied: rounded once
        weights.pop(TABLES[0], None)
    for name in list(weights):
        weight = weights.pop(name)
        if name not in TABLES and not name.endswith("_proj.weight"):
            rounded[name] = weight
            continue
        if weight.shape[1] % GROUP_SIZE:
            raise ConfigError(
                f"quantization: {name} has {weight.shape[1]} inputs here; {config.quantization} takes multiples of "
                f"{GROUP_SIZE}"
            )
        rounded[name] = round_weight(weight, TABLE_BITS if name in TABLES else bits)
    if config.tie_word_embeddings and TABLES[1] in rounded:
        rounded[TABLES[0]] = rounded[TABLES[1]]
    return rounded
