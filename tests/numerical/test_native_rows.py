"""Draws and log-probabilities without sorting, by every instruction set, against float64 and a sort."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal_kernels import native, native_library, ops, reference, sampling
from shoal_kernels.draws import Draw, RowOperators
from shoal_kernels.native import NativeDecoder
from shoal_kernels.native_shape import DecoderShape
from shoal_replica.model.sampler import Sampler, SamplerRow
from shoal_replica.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

NEAR = 2e-6  # relative: float32 weights may decide otherwise about what lies this close to a limit
SIZES = (1, 2, 15, 16, 17, 63, 1000, 1024, 1025, 3000)


def make_decoder(kernels: str, num_threads: int) -> NativeDecoder:
    """A decoder of zeros, for its threads and its instruction set."""
    shape = DecoderShape(
        dtype=torch.float32, vocab_size=16, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_size=16, rms_norm_eps=1e-5, tied_embeddings=True, sliding_window=None, max_positions=16,
        block_size=16, num_blocks=1, num_threads=num_threads,
    )  # fmt: skip
    sizes = {"lm_head.weight": (16, 32), "norm.weight": (32,)}
    for name in ("attention_norm", "mlp_norm"):
        sizes[f"layers.0.{name}.weight"] = (32,)
    for name, size in (("qkv_proj", 64), ("gate_up_proj", 64), ("o_proj", 32), ("down_proj", 32)):
        sizes[f"layers.0.{name}.weight"] = (size, 32)
    weights = {name: torch.zeros(size) for name, size in sizes.items()}
    return NativeDecoder(shape, weights.items(), torch.zeros(16, 16), kernels)


@pytest.fixture(scope="module", params=[*product(native_library.supported_kernels(), (1, 2)), None], ids=str)
def operators(request: pytest.FixtureRequest) -> RowOperators:
    """A decoder of each instruction set, with one and with two threads; and none, as for models that torch serves."""
    return ops if request.param is None else make_decoder(*request.param)


def near(how: Draw) -> list[Draw]:
    """``how``, and draws that differ from it by no more than rounding may."""
    return [
        how._replace(min_p=how.min_p * a, top_p=min(1.0, how.top_p * b) if how.top_p < 1.0 else 1.0, uniform=uniform)
        for a, b in product((1 - NEAR, 1, 1 + NEAR), repeat=2)
        for uniform in (max(0.0, how.uniform - NEAR), how.uniform, how.uniform + NEAR)
    ]


def check(operators: RowOperators, logits: Tensor, draws: list[Draw]) -> None:
    numbers = range(len(logits))
    for i, (token_id, how) in enumerate(zip(operators.draw(logits, numbers, draws), draws, strict=True)):
        if reference.draw(logits, [i], [how]) != [token_id]:
            assert token_id in {reference.draw(logits, [i], [other])[0] for other in near(how)}, how


def rows(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Distributions of every kind: flat, as a model's, nearly certain, with many equals, and with tokens ruled out."""
    noise = torch.randn(size, generator=generator)
    ruled_out = noise.clone()
    ruled_out[1::3] = -torch.inf
    return {
        "flat": noise * 1e-3,
        "model": noise * 3 - 20,
        "certain": noise * 40,
        "equals": (noise * 2).round(),
        "constant": torch.full((size,), -7.5),
        "ruled out": ruled_out,
        "huge": noise * 1e37,
    }


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_k": 12, "top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.8, "temperature": 1.7},
    {"temperature": 1e-300},
    {"temperature": 1e300, "top_k": 2**70},
]


@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_reference(operators: RowOperators, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    plain = {"temperature": 0.8, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
    logits, draws = [], []
    for row in rows(size, generator).values():
        for filters in FILTERS:
            uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
            logits.append(row)
            draws.append(Draw(**plain | filters, uniform=uniform))
    check(operators, torch.stack(logits), draws)


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_distribution(operators: RowOperators, uniform: float) -> None:
    """Not a token that was dropped, nor one of no probability, at either end."""
    logits = torch.tensor([[-torch.inf, -200.0, 1.0, 3.0, 2.0, -200.0, -torch.inf]])
    for filters, first, last in (({}, 2, 4), ({"top_k": 2}, 3, 4), ({"top_p": 0.5}, 3, 3), ({"min_p": 0.3}, 3, 4)):
        how = Draw(**{"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | filters, uniform=uniform)
        assert operators.draw(logits, [0], [how]) == [last if uniform else first]


@given(data=st.data())
def test_any_row_of_few_values(data: st.DataObject) -> None:
    """Many equals, at every limit."""
    values = data.draw(st.lists(st.sampled_from([0.0, -0.5, -1.0, -3.0, 2.0, -math.inf]), min_size=1, max_size=40))
    if max(values) == -math.inf:
        values[0] = 0.0
    how = Draw(
        temperature=data.draw(st.sampled_from([0.1, 1.0, 3.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.1, 0.5])),
        top_k=data.draw(st.integers(0, 45)),
        top_p=data.draw(st.floats(1e-6, 1.0)),
        uniform=data.draw(st.floats(0.0, 1.0, exclude_max=True)),
    )
    for operators in (ops, sampling):
        check(operators, torch.tensor([values]), [how])


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities_are_those_of_the_reference(operators: RowOperators, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for name, row in rows(size, generator).items():
        logits = torch.stack([row, row.flip(0), row])
        token_ids, counts = [0, size - 1, size // 2], [0, 5, size + 3]
        actual = operators.log_probabilities(logits, [2, 1, 0], token_ids, counts)
        expected = reference.log_probabilities(logits, [2, 1, 0], token_ids, counts)
        for mine, wanted in zip(actual, expected, strict=True):
            assert mine.logprob == pytest.approx(wanted.logprob, rel=1e-5, abs=1e-5), name
            assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in wanted.top], name
            values = [[value for _, value in found.top] for found in (mine, wanted)]
            assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5), name


def test_no_alternatives_are_wanted(operators: RowOperators) -> None:
    logits = torch.tensor([[0.0, 0.0]])
    ((logprob, top),) = operators.log_probabilities(logits, [0], [1], [0])
    assert (logprob, top) == (pytest.approx(math.log(0.5)), ())


def test_what_a_row_draws_does_not_depend_on_threads_or_other_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 5000, generator=generator) * 2
    draws = [Draw(0.7, 0.0, 50 * (i % 2), 0.9, torch.rand((), generator=generator).item()) for i in range(40)]
    alone = [make_decoder("", 1).draw(logits, [i], [how])[0] for i, how in enumerate(draws)]
    for num_threads in (2, 3):
        decoder = make_decoder("", num_threads)
        assert decoder.draw(logits, range(40), draws) == alone
        some = [31, 2, 17, 3]
        assert decoder.draw(logits, some, [draws[i] for i in some]) == [alone[i] for i in some]


def test_a_filter_that_leaves_fewer_than_the_next_one_keeps() -> None:
    """Also of many equals, where a limit falls among them."""
    logits = torch.zeros(3, 200_000)
    logits[1, 5:] = -60.0
    plain = {"temperature": 1.0, "min_p": 0.1, "top_k": 40, "top_p": 0.9, "uniform": 0.999}
    draws = [Draw(**plain), Draw(**plain), Draw(**plain | {"top_k": 0})]
    # All of 200 000 equals, five, and the first nine tenths of 200 000.
    assert ops.draw(logits, range(3), draws) == [179_820, 4, 179_820]
    (found,) = ops.log_probabilities(logits, [0], [7], [3])
    assert [token_id for token_id, _ in found.top] == [0, 1, 2]


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(4, 8).double(), torch.zeros(8, 4).T, torch.zeros(4, 16)[:, ::2], torch.zeros(1, 8).expand(4, 8)],
    ids=["double", "columns", "strides", "expanded"],
)
def test_memory_of_another_shape_is_refused(logits: Tensor) -> None:
    decoder, how = make_decoder("", 1), Draw(1.0, 0.0, 0, 1.0, 0.5)
    with pytest.raises(ValueError, match="must be contiguous float32"):
        decoder.draw(logits, [0], [how])
    with pytest.raises(ValueError, match="must be contiguous float32"):
        decoder.log_probabilities(logits, [0], [0], [1])
    rows = torch.zeros(4, 8)
    for numbers, draws in (([4], [how]), ([-1], [how]), ([0, 1], [how]), ([], [])):
        with pytest.raises(ValueError, match="rows: got"):
            decoder.draw(rows, numbers, draws)
    with pytest.raises(ValueError, match="token_ids: must be 1 below 8"):
        decoder.log_probabilities(rows, [0], [8], [1])


def test_the_sampler_gives_each_row_what_it_gets_alone() -> None:
    """Over a decoder's own operators: greedy, drawn and penalised rows, with and without log-probabilities."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "logprobs": 4},
    ]
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(30, 700, generator=generator) * 2
    tokens = torch.randint(700, (30, 50), generator=generator).numpy()
    rows = [SamplerRow(i, SamplingParams(seed=i, **kinds[i % len(kinds)]), 0, 20 + i % 3, tokens[i]) for i in range(30)]
    before = logits.clone()
    together = Sampler(make_decoder("", 2)).sample(logits, rows)
    assert torch.equal(logits, before)
    assert together == [Sampler(make_decoder("", 1)).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(30)]
    assert together == Sampler().sample(logits, rows)
