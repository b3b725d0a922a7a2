"""Mixtures of experts by the native kernels: which experts each row gets, and what they make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures.native_models import (
    Part,
    check_sequence,
    make_experts,
    make_shape,
    make_weights,
    rotary_table,
    round_matrices,
    run,
    tokens,
)

from shoal_kernels import native, native_library
from shoal_kernels.integers import IntegerWeight
from shoal_kernels.native import NativeDecoder
from shoal_replica.executor import finish

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

KERNELS = native_library.supported_kernels()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "chosen"), [(5, 1), (5, 2), (8, 8), (33, 4)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_each_row_goes_to_its_likeliest_experts(
    kernels: str, num_experts: int, chosen: int, renormalize: bool, num_threads: int
) -> None:
    experts = make_experts(
        num_experts=num_experts, num_experts_per_token=chosen, renormalize=renormalize, held=range(num_experts)
    )
    shape = make_shape(num_layers=3, experts=experts, num_threads=num_threads)
    check_sequence(shape, make_weights(shape, qk_norm=True), [1, 130, 17, 1, 1, 33, 200, 1], kernels)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("chosen", "scale", "shared_size"), [(1, 1.0, 0), (2, 2.5, 30), (4, 0.5, 200)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_sigmoid_router_chooses_by_its_bias_and_not_its_weights(
    kernels: str, chosen: int, scale: float, shared_size: int, renormalize: bool, num_threads: int
) -> None:
    experts = make_experts(num_experts_per_token=chosen, scale=scale, shared_size=shared_size, renormalize=renormalize)
    shape = make_shape(num_layers=3, experts=replace(experts, scores="sigmoid"), num_threads=num_threads)
    weights = make_weights(shape, qk_norm=True)
    check_sequence(shape, weights, [1, 130, 17, 1, 200, 1], kernels)
    weights["layers.0.router.bias"][3] = 9.0  # one that all prefer, however little they think of it
    check_sequence(shape, weights, [40, 1], kernels)


@pytest.mark.parametrize("size", [2, 30, 64, 100])
def test_sizes_without_whole_vectors(size: int) -> None:
    shape = make_shape(hidden_size=94, experts=make_experts(size=size, layers=(0, 1)))
    check_sequence(shape, make_weights(shape), [60, 1, 1])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_rows_to_the_same_experts(num_threads: int) -> None:
    """A router that finds all alike chooses the first: more rows for them than are multiplied at once."""
    shape = make_shape(experts=make_experts(layers=(1,)), num_threads=num_threads)
    weights = make_weights(shape)
    weights["layers.1.router.weight"].zero_()
    check_sequence(shape, weights, [500, 1])


@pytest.mark.parametrize("bits", [None, (8, 16), (4, 8)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_does_not_depend_on_its_company_or_the_threads(kernels: str, bits: tuple[int, int] | None) -> None:
    shape = make_shape(dtype=torch.bfloat16, experts=make_experts(num_experts=12, held=range(12)), num_layers=3)
    shape = replace(shape, intermediate_size=160)
    weights: dict[str, torch.Tensor | IntegerWeight] = {**make_weights(shape)}
    if bits is not None:
        weights = round_matrices(make_weights(shape), *bits)
    parts, first = [], 0
    for length in (1, 3, 17, 70, 300):
        held = list(range(first, first + length // 16 + 1))
        parts.append(Part(tokens(shape, length, seed=length), 0, held))
        first += len(held)
    alone, together = (
        NativeDecoder(replace(shape, num_threads=n), weights.items(), rotary_table(shape), kernels) for n in (1, 3)
    )
    assert torch.equal(run(together, *parts), torch.cat([run(alone, part) for part in parts]))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_becomes_nan_in_its_own_rows(value: float, renormalize: bool, scores: str) -> None:
    experts = make_experts(layers=(0,), renormalize=renormalize, scores=scores)
    shape = make_shape(num_layers=1, tied_embeddings=False, experts=experts)
    weights, token_ids, odd = make_weights(shape), [*range(5), *range(6, 16)], 5
    expected = run(NativeDecoder(shape, weights.items(), rotary_table(shape)), Part(token_ids, 0, [0]))
    weights["embed_tokens.weight"][odd, 3] = value
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
    found = run(decoder, Part(token_ids, 0, [0]), Part([odd], 0, [1]))
    assert torch.equal(found[:-1], expected)
    assert found[-1].isnan().all()


def test_a_missing_mlp_of_all_tokens_is_named() -> None:
    shape = make_shape(experts=make_experts(layers=(1,), shared_size=8))
    weights = {name: weight for name, weight in make_weights(shape).items() if "shared_mlp.down" not in name}
    with pytest.raises(ValueError, match=r"layers\.1\.shared_mlp\.down_proj\.weight' is missing"):
        NativeDecoder(shape, weights.items(), rotary_table(shape))


def test_a_missing_router_is_named() -> None:
    shape = make_shape(experts=make_experts(layers=(1,)))
    weights = {name: weight for name, weight in make_weights(shape).items() if "router" not in name}
    with pytest.raises(ValueError, match=r"layers\.1\.router\.weight' is missing"):
        NativeDecoder(shape, weights.items(), rotary_table(shape))


def test_an_mlp_that_is_not_there_cannot_be_adapted() -> None:
    shape = make_shape(experts=make_experts(layers=(1,)))
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    down, up = torch.zeros(2, shape.hidden_size), torch.zeros(2 * shape.intermediate_size, 2)
    finish(decoder.add_adapter([("layers.0.gate_up_proj", (down, up))]))
    with pytest.raises(ValueError, match="has experts, which cannot be adapted"):
        finish(decoder.add_adapter([("layers.1.gate_up_proj", (down, up))]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_token": 6}, "experts_per_token: must be at most num_experts"),
        ({"held": range(3, 7)}, "held_experts: must be some of num_experts"),
        ({"held": range(0)}, "held_experts: must be some of num_experts"),
        ({"size": 63}, "expert_size, shared_size: must be even"),
        ({"shared_size": 63}, "expert_size, shared_size: must be even"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    shape = make_shape(experts=make_experts(**changes))
    with pytest.raises(ValueError, match=message):
        NativeDecoder(shape, [], rotary_table(shape))
