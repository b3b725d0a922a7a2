"""Adapters in the native decoder, against the plain oracle with the adapters merged into its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures.native_models import (
    DTYPES,
    INTEGERS,
    MAX_ERROR,
    Part,
    error,
    make_shape,
    make_weights,
    oracle_logits,
    rotary_table,
    round_matrices,
    run,
    shuffled_blocks,
    tokens,
    widened,
)
from torch import Tensor

from shoal_kernels import native, native_library
from shoal_kernels.integers import IntegerWeight
from shoal_kernels.native import NO_ADAPTER, NativeDecoder
from shoal_kernels.native_shape import DecoderShape
from shoal_replica.executor import finish

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

KERNELS = native_library.supported_kernels()
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
Pairs = dict[str, tuple[Tensor, Tensor]]


def make_pairs(
    shape: DecoderShape, weights: dict[str, Tensor] | dict[str, Tensor | IntegerWeight], seed: int, **ranks: int
) -> Pairs:
    """Random factors of every layer's products, of the given ranks, that change about as much as the weights do."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, weight in widened(dict(weights)).items():
        product = name.removesuffix(".weight").rpartition(".")[2]
        if (rank := ranks.get(product, 0)) == 0:
            continue
        out_size, in_size = weight.shape
        down = torch.randn(rank, in_size, generator=generator) / in_size**0.5
        up = torch.randn(out_size, rank, generator=generator) / rank**0.5
        pairs[name.removesuffix(".weight")] = (down.to(shape.dtype), up.to(shape.dtype))
    return pairs


def merged(weights: dict[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    whole = {name: tensor.float() for name, tensor in weights.items()}
    for name, (down, up) in pairs.items():
        whole[f"{name}.weight"] = whole[f"{name}.weight"] + up.float() @ down.float()
    return whole


def check(
    shape: DecoderShape,
    weights: dict[str, Tensor] | dict[str, Tensor | IntegerWeight],
    adapters: list[Pairs],
    lengths: list[int],
    kernels: str = "",
) -> None:
    """Sequences of these lengths, with each adapter and without, all in one step for their prompts, and then in one for
    a token of each.
    """
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels)
    slots = [NO_ADAPTER, *(finish(decoder.add_adapter(pairs.items())) for pairs in adapters)]
    of_slot = dict(zip(slots, [{}, *adapters], strict=True))
    asked = [slots[i % len(slots)] for i in range(len(lengths))]
    blocks, token_ids, parts = shuffled_blocks(shape), [], []
    for seed, length in enumerate(lengths):
        own = [blocks.pop() for _ in range(-(-(length + 1) // shape.block_size))]
        token_ids.append(tokens(shape, length + 1, seed))
        parts.append(Part(token_ids[-1][:-1], 0, own))
    prompts = run(decoder, *parts, adapters=asked)
    last = [Part(ids[-1:], len(ids) - 1, part.blocks) for ids, part in zip(token_ids, parts, strict=True)]
    decodes = run(decoder, *last, adapters=asked)
    decoder.close()
    start = 0
    for i, (slot, ids) in enumerate(zip(asked, token_ids, strict=True)):
        expected = oracle_logits(shape, merged(widened(dict(weights)), of_slot[slot]), torch.tensor(ids))
        actual = torch.cat((prompts[start : start + len(ids) - 1], decodes[i : i + 1]))
        assert error(actual, expected) < MAX_ERROR[shape.dtype]
        assert error(actual[-1], expected[-1]) < 3 * MAX_ERROR[shape.dtype]
        start += len(ids) - 1


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_instruction_set(kernels: str, dtype: torch.dtype, num_threads: int) -> None:
    shape = make_shape(dtype=dtype, num_threads=num_threads, num_blocks=60)
    weights = make_weights(shape, qk_norm=True, biases=True)
    some = make_pairs(shape, weights, 1, qkv_proj=12, o_proj=4, gate_up_proj=8, down_proj=5)
    other = make_pairs(shape, weights, 2, qkv_proj=1, gate_up_proj=33)
    check(shape, weights, [some, other], [1, 130, 17, 70, 1, 33, 200], kernels)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("intermediate", [104, 90, 64])
def test_each_product_by_itself(product: str, intermediate: int) -> None:
    shape = make_shape(intermediate_size=intermediate, num_threads=2, num_blocks=60)
    weights = make_weights(shape)
    check(shape, weights, [make_pairs(shape, weights, 1, **{product: 6})], [3, 1, 64, 150, 129], "")


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_beside_integer_weights(kernels: str, bits: int, activation_bits: int) -> None:
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, num_threads=2, num_blocks=60)
    weights = round_matrices(make_weights(shape), bits, activation_bits)
    some = make_pairs(shape, weights, 1, qkv_proj=12, o_proj=4, gate_up_proj=8, down_proj=5)
    check(shape, weights, [some], [1, 130, 17, 1, 200], kernels)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_does_not_depend_on_its_company(kernels: str, num_threads: int) -> None:
    """Nor on how rows are shared out: the bits are the same alone and beside others, with and without adapters."""
    shape = make_shape(dtype=torch.bfloat16, num_threads=num_threads, num_blocks=60, hidden_size=128)
    weights = make_weights(shape)
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels)
    pairs = [make_pairs(shape, weights, seed, qkv_proj=6, gate_up_proj=8, down_proj=4, o_proj=3) for seed in (1, 2)]
    slots = [finish(decoder.add_adapter(each.items())) for each in pairs]
    parts = [Part(tokens(shape, length, length), 0, list(range(i * 15, i * 15 + 14)))
             for i, length in enumerate((5, 200, 70, 1))]  # fmt: skip
    asked = [slots[0], slots[1], NO_ADAPTER, slots[0]]
    together = run(decoder, *parts, adapters=asked)
    alone = torch.cat([run(decoder, part, adapters=[slot]) for part, slot in zip(parts, asked, strict=True)])
    assert torch.equal(together, alone)
    without = run(decoder, parts[2])
    assert torch.equal(without, together[205:275])
    decoder.close()


def test_buffers_of_a_step_that_pages_do_not_hide() -> None:
    """So large that what is written beyond their end would be seen: buffers are rounded up to huge pages."""
    shape = make_shape(hidden_size=512, intermediate_size=3072, num_layers=1, num_threads=3, num_blocks=90)
    weights = make_weights(shape)
    pairs = make_pairs(shape, weights, 1, qkv_proj=1500, gate_up_proj=300, down_proj=150, o_proj=150)
    check(shape, weights, [pairs], [1, 500, 2, 450], "")


def test_slots_are_used_again() -> None:
    shape = make_shape()
    weights = make_weights(shape)
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
    pairs = [make_pairs(shape, weights, seed, qkv_proj=4) for seed in range(3)]
    first, second = (finish(decoder.add_adapter(each.items())) for each in pairs[:2])
    part = Part(tokens(shape, 20), 0, [3, 1])
    before = run(decoder, part, adapters=[second])
    decoder.remove_adapter(first)
    with pytest.raises(ValueError, match="adapter"):
        run(decoder, part, adapters=[first])
    with pytest.raises(ValueError, match="adapter"):
        decoder.remove_adapter(first)
    assert finish(decoder.add_adapter(pairs[2].items())) == first
    assert torch.equal(run(decoder, part, adapters=[second]), before)
    assert not torch.equal(run(decoder, part, adapters=[first]), before)
    decoder.close()


@pytest.mark.parametrize("slot", [1, -2, 99])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    """But for any below 0, which is none."""
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    part = Part(tokens(shape, 5), 0, [0])
    if slot < 0:
        assert torch.equal(run(decoder, part, adapters=[slot]), run(decoder, part))
    else:
        with pytest.raises(ValueError, match="adapter"):
            run(decoder, part, adapters=[slot])
    decoder.close()


def test_factors_that_do_not_fit_are_refused_and_leave_nothing() -> None:
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    down, up = torch.zeros(4, 96), torch.zeros(640, 4)
    for name, pair, message in (
        ("layers.0.qkv_proj", (down, up[:-1]), r"must be \(640, 96\) in rank 4"),
        ("layers.0.qkv_proj", (down[:3], up), r"must be \(640, 96\) in rank 3"),
        ("layers.0.qkv_proj", (down.bfloat16(), up), "must be torch.float32"),
        ("layers.9.qkv_proj", (down, up), "layer"),
        ("layers.0.attention_norm", (down, up), "must be one of qkv_proj, o_proj, gate_up_proj, down_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            finish(decoder.add_adapter([("layers.1.qkv_proj", (down, up)), (name, pair)]))
    assert finish(decoder.add_adapter([])) == 0
    decoder.close()


def test_a_shard_of_layers_has_their_adapters() -> None:
    shape = make_shape(num_layers=1, first_layer=1, is_first_stage=False)
    weights = {name: w for name, w in make_weights(make_shape()).items() if not name.startswith("layers.0.")}
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
    pairs = make_pairs(replace(shape, num_layers=2), weights, 1, down_proj=3)
    assert list(pairs) == ["layers.1.down_proj"]
    assert finish(decoder.add_adapter(pairs.items())) == 0
    decoder.close()
