"""A LoRA adapter (Hu et al. 2021), as far as it has to be known before its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WEIGHTS_FILE = "adapter_model.safetensors"
NAME_PATTERN = r"^[\w.:/-]{1,128}$"
VERSION_MARK = "@"  # between an adapter's name and its version; not allowed in names
RANK_UNIT = 32  # the native kernels pad ranks to a multiple of it
PAGE_BYTES = 2 << 20  # and give each adapter huge pages of its own


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one projection's adaptation: y = x W^T becomes y + scale (x A^T) B^T.

    Attributes:
        module: the projection's stored name, such as ``model.layers.0.self_attn.q_proj``.
        down, up: names of A [rank, in_size] and B [out_size, rank] in the file.
    """

    module: str
    rank: int
    scale: float
    down: str
    up: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """An adapter and the projections that it changes.

    ``num_values`` counts both factors of every packed product as they are held at most: those of projections that share
    a product are stacked, with zeros between them, and ranks are padded.
    """

    name: str
    folder: str
    factors: tuple[Factors, ...]
    num_values: int

    @property
    def title(self) -> str:
        """The name without its version."""
        return title(self.name)


def title(name: str) -> str:
    """An adapter's name without its version, as clients know it."""
    return name.partition(VERSION_MARK)[0]


def adapter_bytes(adapters: Iterable[AdapterConfig], value_bytes: int) -> int:
    """The most bytes that adapters take in memory, on a replica of one rank."""
    return sum(adapter.num_values * value_bytes + PAGE_BYTES for adapter in adapters)
