"""The CPU backend against the float32 reference, over shapes, dtypes and mixtures of prefill, chunk and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_kernels import ops, reference
from shoal_kernels.metadata import AttentionMetadata

DTYPES = [torch.float32, torch.bfloat16]
# Absolute and relative; bfloat16 keeps 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# (tokens already in the cache, tokens of this step) per sequence.
STEPS = {
    "decode": [(1, 1), (40, 1), (15, 1), (16, 1)],
    "one decode": [(33, 1)],
    "first token": [(0, 1)],
    "prefill": [(0, 33), (0, 5)],
    "chunk": [(16, 16), (37, 11)],
    "mixed": [(20, 1), (0, 17), (31, 9), (64, 1)],
}


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_step(lengths: list[tuple[int, int]], block_size: int, num_blocks: int, seed: int = 0) -> AttentionMetadata:
    """A step whose blocks are dealt at random, so that no test passes by reading them in order."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables, slots, starts = [], [], [0]
    for computed, new in lengths:
        tables.append([order.pop() for _ in range(-(-(computed + new) // block_size))])
        slots += [tables[-1][p // block_size] * block_size + p % block_size for p in range(computed, computed + new)]
        starts.append(starts[-1] + new)
    width = max(len(table) for table in tables)
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=[computed + new for computed, new in lengths],
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )


def check_attention(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    head_size: int = 64,
    num_kv_heads: int = 2,
    group: int = 2,
    block_size: int = 16,
    window: int | None = None,
) -> None:
    num_blocks = 32
    metadata = make_step(lengths, block_size, num_blocks)
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    keys, values = randn(*shape, dtype=dtype, seed=1), randn(*shape, dtype=dtype, seed=2)
    q = randn(metadata.query_start_loc[-1], num_kv_heads * group, head_size, dtype=dtype, seed=3)
    scale = head_size**-0.5
    actual = ops.paged_attention(q, keys, values, metadata, scale, window)
    assert actual.shape == q.shape
    close(actual, reference.paged_attention(q, keys, values, metadata, scale, window), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
def test_attention_over_steps_and_windows(step: str, dtype: torch.dtype, block_size: int, window: int | None) -> None:
    check_attention(STEPS[step], dtype, block_size=block_size, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (3, 3), (4, 1), (2, 4), (1, 8), (2, 7)])
def test_attention_over_heads(head_size: int, num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    check_attention(STEPS["mixed"], dtype, head_size=head_size, num_kv_heads=num_kv_heads, group=group)


def test_attention_does_not_see_blocks_of_others() -> None:
    """Changing every slot outside a sequence's own tokens changes nothing."""
    metadata = make_step(STEPS["mixed"], 16, 32)
    keys, values = randn(32, 2, 16, 64, dtype=torch.float32, seed=1), randn(32, 2, 16, 64, dtype=torch.float32, seed=2)
    q = randn(metadata.query_start_loc[-1], 4, 64, dtype=torch.float32, seed=3)
    before = ops.paged_attention(q, keys, values, metadata, 0.125)
    own = torch.zeros(32, 16, dtype=torch.bool)
    for seq, seq_len in enumerate(metadata.seq_lens):
        for position in range(seq_len):
            own[metadata.block_tables[seq, position // 16], position % 16] = True
    for cache in (keys, values):
        cache.masked_fill_(~own[:, None, :, None], 1e4)
    torch.testing.assert_close(ops.paged_attention(q, keys, values, metadata, 0.125), before, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (5, 3, 80)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    close(ops.rms_norm(x, weight.float(), 1e-5), reference.rms_norm(x, weight.float(), 1e-5), dtype)
    assert ops.rms_norm(x, weight.float(), 1e-5).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(9, 96), (9, 96), (96,)]))
    expected = reference.add_rms_norm(x, residual, weight, 1e-6)
    for actual, wanted in zip(ops.add_rms_norm(x, residual, weight, 1e-6), expected, strict=True):
        close(actual, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
def test_rotary_embedding(head_size: int, dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.linspace(0, 1, head_size // 2))
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    positions = torch.tensor([0, 49, 7, 7, 21])
    qkv = randn(5, 8, head_size, dtype=dtype)
    q, k = qkv[:, :6], qkv[:, 6:]  # views with strides, as the packed projection gives them
    expected = reference.rotary_embedding(positions, q, k, cos_sin_cache)
    for actual, wanted in zip(ops.rotary_embedding(positions, q, k, cos_sin_cache), expected, strict=True):
        close(actual, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = randn(6, 192, dtype=dtype) * 4
    close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_and_mul(dtype: torch.dtype) -> None:
    gate_up = randn(6, 192, dtype=dtype) * 4
    close(ops.gelu_tanh_and_mul(gate_up), reference.gelu_tanh_and_mul(gate_up), dtype)
    expected = torch.nn.functional.gelu(gate_up[:, :96].float(), approximate="tanh") * gate_up[:, 96:].float()
    close(reference.gelu_tanh_and_mul(gate_up), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_linear(num_tokens: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(num_tokens, 64, dtype=dtype), randn(48, 64, dtype=dtype, seed=1) / 8
    bias = randn(48, dtype=dtype, seed=2) if with_bias else None
    close(ops.linear(x, weight, bias), reference.linear(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv(dtype: torch.dtype) -> None:
    kv = randn(11, 6, 64, dtype=dtype)
    k, v = kv[:, :3], kv[:, 3:]
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(5))[:11]
    actual = [torch.zeros(8, 3, 16, 64, dtype=dtype) for _ in range(2)]
    expected = [torch.zeros(8, 3, 16, 64, dtype=dtype) for _ in range(2)]
    ops.write_kv(k, v, actual[0], actual[1], slots)
    reference.write_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert actual[0].count_nonzero() == k.numel()


def test_copy_blocks_reads_before_it_writes() -> None:
    actual = [randn(6, 2, 4, 8, dtype=torch.float32, seed=i) for i in range(2)]
    expected = [cache.clone() for cache in actual]
    pairs = [(0, 1), (1, 2), (5, 0)]
    ops.copy_blocks(actual[0], actual[1], pairs)
    reference.copy_blocks(expected[0], expected[1], pairs)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(("top_ks", "top_ps"), [([5, 1, 40], [1.0, 0.3, 0.5]), ([0, 0, 7], [0.1, 0.9, 0.99])])
def test_keep_top(top_ks: list[int], top_ps: list[float]) -> None:
    logits = randn(3, 64, dtype=torch.float32)
    logits[0, :8] = logits[0, 0]  # tokens as likely as the k-th all stay
    assert torch.equal(ops.keep_top(logits, top_ks, top_ps), reference.keep_top(logits, top_ks, top_ps))


def test_unknown_device_is_named() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        ops.rms_norm(torch.empty(2, 4, device="meta"), torch.empty(4, device="meta"), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "biased"])
def test_select_experts(scores: str, renormalize: bool, dtype: torch.dtype) -> None:
    logits, bias = randn(9, 8, dtype=dtype), randn(8, dtype=torch.float32, seed=1)
    rule: tuple[Any, ...] = ("sigmoid", bias, 2.5) if scores == "biased" else (scores, None, 2.5)
    weights, expert_ids = ops.select_experts(logits, 3, renormalize, *rule)
    expected_weights, expected_ids = reference.select_experts(logits, 3, renormalize, *rule)
    assert torch.equal(expert_ids, expected_ids)
    close(weights, expected_weights, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize(("first", "num_held"), [(0, 8), (2, 3), (7, 1), (5, 0)])
def test_apply_experts(num_tokens: int, first: int, num_held: int, dtype: torch.dtype) -> None:
    x = randn(num_tokens, 48, dtype=dtype)
    gate_up = randn(num_held, 2 * 32, 48, dtype=dtype, seed=1) / 7
    down = randn(num_held, 48, 32, dtype=dtype, seed=2) / 6
    chosen = ops.select_experts(randn(num_tokens, 8, dtype=dtype, seed=3), 2, True)
    actual = ops.apply_experts(x, gate_up, down, *chosen, first)
    close(actual, reference.apply_experts(x, gate_up, down, *chosen, first), dtype)


@pytest.mark.parametrize("size", [1, 3, 64, 1000, 4096, 49152, 49155])
def test_row_maxima(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(5, size, generator=generator)
    x[1] = -torch.inf
    x[2, [size // 2, size - 1]] = 9.0  # a tie: the first counts
    x[3, size - 1] = torch.inf
    x[4, size // 3 :: 7] = torch.nan
    values, places = ops.row_maxima(x)
    expected_values, expected_places = reference.row_maxima(x)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert places.tolist() == expected_places.tolist()
    assert places[2] == size // 2
