"""What the native decoder would read beyond its end is refused before it is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures.native_models import make_shape, make_weights, rotary_table, round_matrices
from torch import Tensor

from shoal_kernels import native
from shoal_kernels.integers import IntegerWeight
from shoal_kernels.native import NO_ADAPTER, NativeDecoder

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

SHAPE = make_shape(dtype=torch.bfloat16, intermediate_size=96)


@pytest.mark.parametrize("adapters", [[], [NO_ADAPTER], [NO_ADAPTER] * 3])
def test_adapters_are_those_of_all_sequences(adapters: list[int]) -> None:
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))

    def forward(adapters: list[int] | None) -> Tensor:
        return decoder.forward(
            input_ids=np.array([1, 2]),
            positions=np.array([0, 0]),
            query_start_loc=[0, 1, 2],
            seq_lens=[1, 1],
            block_tables=np.array([[0], [1]], np.int32),
            slot_mapping=np.array([0, shape.block_size]),
            sample_rows=[0, 1],
            adapters=adapters,
        )

    with pytest.raises(ValueError, match=f"adapters: has {len(adapters)} elements; must have 2, as seq_lens"):
        forward(adapters)
    assert torch.equal(forward([NO_ADAPTER] * 2).clone(), forward(None))


@pytest.mark.parametrize(
    ("part", "bits", "complaint"),
    [
        ("scales", 8, r"scales: got torch.float32 \(\d+, \d\); must be torch.bfloat16 \(\d+, \d\)"),
        ("minimums", 4, r"minimums: got torch.float32 \(\d+, \d\); must be torch.bfloat16 \(\d+, \d\)"),
        ("values", 4, r"values: got torch.float32; must be torch.uint8 for 4 bits"),
    ],
)
def test_integers_have_parts_of_one_kind(part: str, bits: int, complaint: str) -> None:
    name, rounded, weight = a_rounded_matrix(bits)
    wrong = replace(weight, **{part: getattr(weight, part).float()})
    with pytest.raises(ValueError, match=complaint):
        load(rounded | {name: wrong})


@pytest.mark.parametrize(("part", "bits"), [("scales", 8), ("scales", 4), ("minimums", 4)])
def test_integers_have_a_part_for_each_group(part: str, bits: int) -> None:
    name, rounded, weight = a_rounded_matrix(bits)
    load(rounded)
    held: Tensor = getattr(weight, part)
    for cut in (held[:, :1], held[:-1], held.flatten()):
        with pytest.raises(ValueError, match=rf"{part}: got torch.bfloat16 .*; must be torch.bfloat16 \({len(held)}, "):
            load(rounded | {name: replace(weight, **{part: cut})})


def a_rounded_matrix(bits: int) -> tuple[str, dict[str, Tensor | IntegerWeight], IntegerWeight]:
    """The name of one, all weights, and the matrix."""
    rounded, name = round_matrices(make_weights(SHAPE), bits), "layers.0.qkv_proj.weight"
    weight = rounded[name]
    assert isinstance(weight, IntegerWeight)
    return name, rounded, weight


def load(weights: dict[str, Tensor | IntegerWeight]) -> None:
    NativeDecoder(SHAPE, weights.items(), rotary_table(SHAPE)).close()
