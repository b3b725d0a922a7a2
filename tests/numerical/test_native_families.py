"""In what families of decoders differ, on every instruction set of the native kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures.native_models import (
    DTYPES,
    FAMILIES,
    INTEGERS,
    Part,
    check_sequence,
    make_shape,
    make_weights,
    rotary_table,
    round_matrices,
    run,
    tokens,
    window_table,
)

from shoal_kernels import native, native_library
from shoal_kernels.native import NativeDecoder

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

KERNELS = native_library.supported_kernels()
CHUNKS = [1, 130, 17, 1, 1, 33, 200, 1]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_instruction_set(kernels: str, dtype: torch.dtype, num_threads: int, family: dict[str, Any]) -> None:
    shape = make_shape(dtype=dtype, num_threads=num_threads, **family)
    check_sequence(shape, make_weights(shape, qk_norm=True), CHUNKS, kernels, num_checked=1)


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_integer_weights(kernels: str, bits: int, activation_bits: int, family: dict[str, Any]) -> None:
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, num_threads=2, **family)
    weights = round_matrices(make_weights(shape, qk_norm=True, biases=True), bits, activation_bits)
    check_sequence(shape, weights, CHUNKS, kernels)


@pytest.mark.parametrize("hidden_size", [94, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_sizes_without_whole_vectors(dtype: torch.dtype, hidden_size: int, family: dict[str, Any]) -> None:
    shape = make_shape(dtype=dtype, hidden_size=hidden_size, **family)
    check_sequence(shape, make_weights(shape), [60, 1, 1])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_decoding_row_does_not_depend_on_its_company_or_the_threads(kernels: str, family: dict[str, Any]) -> None:
    shape = make_shape(dtype=torch.bfloat16, num_blocks=60, **family)
    weights = make_weights(shape, qk_norm=True)
    prompts = [tokens(shape, length, seed=length) for length in (170, 20, 33, 1, 90)]
    blocks = [list(range(12 * i, 12 * i + 12)) for i in range(5)]
    alone, together = (
        NativeDecoder(replace(shape, num_threads=n), weights.items(), rotary_table(shape), kernels, window_table(shape))
        for n in (1, 2)
    )
    for decoder in (alone, together):
        for prompt, held in zip(prompts, blocks, strict=True):
            run(decoder, Part(prompt, 0, held))
    last = [Part([7], len(prompt), held) for prompt, held in zip(prompts, blocks, strict=True)]
    assert torch.equal(run(together, *last), torch.cat([run(alone, part) for part in last]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_that_share_their_first_blocks(kernels: str, family: dict[str, Any]) -> None:
    """Decodes that read shared pages together give the same bits as each alone, with windows or without."""
    shape = make_shape(dtype=torch.bfloat16, num_blocks=60, num_threads=2, **family)
    weights = make_weights(shape, qk_norm=True)
    prefix, shared = tokens(shape, 320), list(range(20))
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels, window_table(shape))
    run(decoder, Part(prefix, 0, shared))
    last = []
    for i, length in enumerate((1, 9, 20, 40)):
        rest, own = tokens(shape, length, seed=i), [*shared, *range(20 + 4 * i, 24 + 4 * i)]
        run(decoder, Part(rest, len(prefix), own))
        last.append(Part([7], len(prefix) + length, own))
    assert torch.equal(run(decoder, *last), torch.cat([run(decoder, part) for part in last]))


def test_gates_far_from_zero_are_finite() -> None:
    """Where gates are so large that their exponentials overflow or vanish, GELU is the gate itself or nothing."""
    shape = make_shape(activation="gelu_tanh", num_layers=1)
    weights = make_weights(shape)
    weights["layers.0.gate_up_proj.weight"][: shape.intermediate_size] *= 1e6
    check_sequence(shape, weights, [40, 1])


def test_a_missing_norm_is_named() -> None:
    shape = make_shape(norm_placement="both")
    weights = {name: w for name, w in make_weights(shape).items() if name != "layers.1.mlp_post_norm.weight"}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp_post_norm\.weight' is missing"):
        NativeDecoder(shape, weights.items(), rotary_table(shape))


def test_tables_of_another_shape_are_refused() -> None:
    shape = make_shape(sliding_window=8, full_layers=(0,))
    weights = make_weights(shape)
    with pytest.raises(ValueError, match="cos_sin"):
        NativeDecoder(shape, weights.items(), rotary_table(shape), "", rotary_table(shape)[1:])
