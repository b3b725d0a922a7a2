"""Our NPU operators, unchanged, against torch in float32 and the reference; and what the device refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_npu
from paged_steps import DTYPE, NPU, STEPS, close, make_step, randn
from simulated_npu import dispatch
from simulated_npu.limits import Refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal_kernels import npu, ops, reference

SCALE = 128**-0.5


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("step", STEPS)
def test_attention_over_steps_and_windows(step: str, window: int | None) -> None:
    paged = make_step(STEPS[step])
    close(paged.actual(SCALE, window), paged.expected(SCALE, window))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 8), (3, 3), (8, 1), (2, 7)])
@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256])
def test_attention_over_heads(head_size: int, num_kv_heads: int, group: int) -> None:
    steps = [(20, 1), (100, 40), (5, 1), (6, 1)]
    paged = make_step(steps, head_size=head_size, num_kv_heads=num_kv_heads, group=group)
    close(paged.actual(head_size**-0.5), paged.expected(head_size**-0.5))


def test_attention_is_one_packed_call_for_a_mixture() -> None:
    paged = make_step(STEPS["mixed"])
    dispatch.calls.clear()
    paged.actual(SCALE)
    (call,) = [kwargs for name, _, kwargs in dispatch.calls if name.endswith("attention_score")]
    assert call["input_layout"] == "TND"
    assert call["sparse_mode"] == 3
    assert call["block_size"] == 128
    assert call["actual_seq_lengths"] == paged.metadata.query_start_loc[1:]
    assert call["actual_seq_lengths_kv"] == paged.metadata.seq_lens


def test_other_head_sizes_are_padded_by_runs_of_one_length() -> None:
    paged = make_step([(20, 1), (5, 1), (0, 40), (0, 40), (3, 1)], head_size=64)
    dispatch.calls.clear()
    paged.actual(0.125)
    calls = [kwargs for name, _, kwargs in dispatch.calls if name.endswith("attention_score")]
    assert [call["input_layout"] for call in calls] == ["BSND"] * 3
    assert [call["actual_seq_lengths"] for call in calls] == [[1, 1], [40, 40], [1]]


def test_sequences_that_share_more_blocks_than_there_are() -> None:
    """By the operator's limit, block counts add up to at most the blocks of the cache; shared prefixes exceed that."""
    paged = make_step([(512 + i, 1) for i in range(5)], shared_prefix=4, num_blocks=9)
    dispatch.calls.clear()
    close(paged.actual(SCALE), paged.expected(SCALE))
    lengths = [kw["actual_seq_lengths_kv"] for name, _, kw in dispatch.calls if name.endswith("attention_score")]
    assert lengths == [[513], [514], [515], [516], [517]]


def test_norms() -> None:
    x, residual, weight = randn(9, 96), randn(9, 96, seed=1), randn(96, seed=2)
    close(ops.rms_norm(x.to(NPU), weight.to(NPU), 1e-5), reference.rms_norm(x, weight, 1e-5))
    actual = ops.add_rms_norm(x.to(NPU), residual.to(NPU), weight.to(NPU), 1e-6)
    for mine, wanted in zip(actual, reference.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        close(mine, wanted, 3e-2)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rotary_embedding(head_size: int, dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.linspace(0, 1, head_size // 2))
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DTYPE)
    positions = torch.tensor([0, 49, 7, 7, 21], dtype=dtype)
    qkv = randn(5, 8, head_size)
    q, k = qkv[:, :6], qkv[:, 6:]  # views with strides, as the packed projection gives them
    on_device = qkv.to(NPU)
    actual = ops.rotary_embedding(positions.to(NPU), on_device[:, :6], on_device[:, 6:], cos_sin_cache.to(NPU))
    for mine, wanted in zip(actual, reference.rotary_embedding(positions, q, k, cos_sin_cache), strict=True):
        close(mine, wanted, 4e-2)


def test_activations_and_linear() -> None:
    gate_up, weight, bias = randn(6, 192), randn(48, 192, seed=1) / 8, randn(48, seed=2)
    close(ops.silu_and_mul(gate_up.to(NPU)), reference.silu_and_mul(gate_up))
    close(ops.gelu_tanh_and_mul(gate_up.to(NPU)), reference.gelu_tanh_and_mul(gate_up))
    close(ops.linear(gate_up.to(NPU), weight.to(NPU), bias.to(NPU)), reference.linear(gate_up, weight, bias), 4e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_write_kv(dtype: torch.dtype) -> None:
    kv = randn(11, 6, 64)
    slots = torch.randperm(4 * 128, generator=torch.Generator().manual_seed(5))[:11].to(dtype)
    expected = [torch.zeros(4, 3, 128, 64, dtype=DTYPE) for _ in range(2)]
    shape = ops.cache_shape("npu", 4, 3, 128, 64)
    actual = [torch.zeros(shape, dtype=DTYPE, device=NPU) for _ in range(2)]
    on_device = kv.to(NPU)
    ops.write_kv(on_device[:, :3], on_device[:, 3:], actual[0], actual[1], slots.to(NPU))
    reference.write_kv(kv[:, :3], kv[:, 3:], expected[0], expected[1], slots)
    for mine, wanted in zip(actual, expected, strict=True):
        assert torch.equal(mine.cpu().transpose(1, 2), wanted)


def test_copy_blocks_reads_before_it_writes() -> None:
    caches = [randn(6, 128, 2, 16, seed=i) for i in range(2)]
    on_device = [cache.to(NPU) for cache in caches]
    pairs = [(0, 1), (1, 2), (5, 0)]
    ops.copy_blocks(on_device[0], on_device[1], pairs)
    reference.copy_blocks(caches[0], caches[1], pairs)
    assert all(torch.equal(mine.cpu(), wanted) for mine, wanted in zip(on_device, caches, strict=True))


@pytest.mark.parametrize(
    ("top_ks", "top_ps"),
    [
        ([5, 1, 40, 50], [1.0, 1.0, 0.5, 0.9]),
        ([0, 0, 0, 0], [0.1, 0.5, 0.9, 0.99]),
        ([0, 3, 0, 2000], [1.0, 0.7, 0.3, 1.0]),
    ],
)
@pytest.mark.parametrize("vocab_size", [64, 3000])
def test_keep_top(top_ks: list[int], top_ps: list[float], vocab_size: int) -> None:
    """Also with k beyond 1024, the operator's limit."""
    logits = randn(4, vocab_size, dtype=torch.float32)
    ks = [min(k, vocab_size) for k in top_ks]
    expected = reference.keep_top(logits, ks, top_ps)
    actual = ops.keep_top(logits.to(NPU), top_ks, top_ps).cpu()
    # At the top-p boundary, a rounding of 1e-7 may decide about one token.
    assert ((actual > -torch.inf).sum(1) - (expected > -torch.inf).sum(1)).abs().max() <= 1
    both = (actual > -torch.inf) & (expected > -torch.inf)
    assert torch.equal(actual[both], logits[both])
    assert (both.sum(1) >= (expected > -torch.inf).sum(1) - 1).all()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("first", "held"), [(0, 6), (0, 3), (3, 3), (4, 2)])
def test_experts(first: int, held: int, renormalize: bool) -> None:
    """All experts on one rank, and the shares of several ranks."""
    x, router = randn(9, 32), randn(9, 6, seed=1)
    gate_up, down = randn(6, 48, 32, seed=2) / 4, randn(6, 32, 24, seed=3) / 4
    weights, ids = ops.select_experts(router.to(NPU), 2, renormalize)
    expected_weights, expected_ids = reference.select_experts(router, 2, renormalize)
    assert torch.equal(ids.cpu().long(), expected_ids)
    close(weights, expected_weights)
    mine = slice(first, first + held)
    actual = ops.apply_experts(
        x.to(NPU), gate_up[mine].contiguous().to(NPU), down[mine].contiguous().to(NPU), weights, ids, first
    )
    expected = reference.apply_experts(x, gate_up[mine], down[mine], expected_weights, expected_ids, first)
    close(actual, expected, 5e-2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_scored_by_sigmoids(renormalize: bool, has_bias: bool) -> None:
    """A bias counts for the choice alone."""
    router, bias = randn(9, 6), randn(6, seed=1).float() if has_bias else None
    weights, ids = ops.select_experts(
        router.to(NPU), 2, renormalize, "sigmoid", None if bias is None else bias.to(NPU), 2.5
    )
    expected_weights, expected_ids = reference.select_experts(router, 2, renormalize, "sigmoid", bias, 2.5)
    assert torch.equal(ids.cpu().long(), expected_ids)
    close(weights, expected_weights)


def test_a_rank_whose_experts_nobody_chose() -> None:
    """Rows in no group are never computed and hold whatever was there."""
    x, gate_up, down = randn(4, 32), randn(2, 48, 32), randn(2, 32, 24)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    out = ops.apply_experts(x.to(NPU), gate_up.to(NPU), down.to(NPU), randn(4, 2).to(NPU), ids.to(NPU), 5)
    assert torch.equal(out.cpu(), torch.zeros(4, 32, dtype=DTYPE))


def refused(match: str) -> pytest.RaisesExc[Refused]:
    return pytest.raises(Refused, match=match)


def test_attention_refuses_what_the_documentation_refuses() -> None:
    paged = make_step([(100, 4), (20, 1)])
    q, keys, values, metadata = paged.on_npu()
    with refused("float16 or bfloat16"):
        ops.paged_attention(q.float(), keys, values, metadata, SCALE)
    with refused("block table is int32"):
        ops.paged_attention(q, keys, values, replace(metadata, block_tables=metadata.block_tables.long()), SCALE)
    with refused("T is 5"):
        ops.paged_attention(q, keys, values, replace(metadata, query_start_loc=[0, 4, 6]), SCALE)
    with refused("add up as they go"):
        ops.paged_attention(q, keys, values, replace(metadata, query_start_loc=[0, 5, 1]), SCALE)
    with refused("a column for each block"):
        ops.paged_attention(q, keys, values, replace(metadata, seq_lens=[104, 129]), SCALE)
    halves = [cache[:, :64].contiguous() for cache in (keys, values)]
    with refused("blocks of 128"):
        ops.paged_attention(q, *halves, metadata, SCALE)
    with refused("2 rows for 1"):
        ops.paged_attention(q[:4], keys, values, replace(metadata, query_start_loc=[0, 4], seq_lens=[104]), SCALE)


def test_writes_refuse_repeated_and_foreign_slots() -> None:
    k, cache = randn(2, 2, 128).to(NPU), torch.zeros(4, 128, 2, 128, dtype=DTYPE, device=NPU)

    def write(slots: list[int], key: Tensor = k) -> None:
        ops.write_kv(key, key, cache, cache.clone(), torch.tensor(slots).to(NPU))

    with refused("written twice"):
        write([3, 3])
    with refused("0 to 511"):
        write([0, 512])
    with refused("0 to 511"):
        write([-1, 0])
    with refused("one dtype"):
        write([0, 1], k.half())
    with refused("one slot for each"):
        write([0])


def test_wrong_names_fail_in_the_real_schema() -> None:
    x = randn(2, 64).to(NPU)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch_npu.npu_rms_norm(x, x[0], eps=1e-6)


def test_an_operator_without_a_reference_does_not_pass_silently() -> None:
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch_npu.npu_gelu(randn(2, 64).to(NPU))


def test_fake_tensors_go_through_the_real_meta_kernels() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(4, 8, 128, dtype=DTYPE, device=NPU)
        cache = torch.empty(8, 128, 256, dtype=DTYPE, device=NPU)
        out, lse = torch_npu.npu_fused_infer_attention_score(
            q,
            cache,
            cache,
            block_table=torch.empty(2, 4, dtype=torch.int32, device=NPU),
            input_layout="TND",
            block_size=128,
            actual_seq_lengths=[3, 4],
            actual_seq_lengths_kv=[9, 9],
            num_heads=8,
            num_key_value_heads=2,
            softmax_lse_flag=True,
        )
        assert out.shape == q.shape
        assert lse.shape == (4, 8, 1)


def test_the_mask_is_made_once() -> None:
    mask = npu.causal_mask(NPU)
    assert mask is npu.causal_mask(NPU)
    assert mask.dtype == torch.int8
    assert torch.equal(mask.cpu(), torch.ones(2048, 2048).triu(1).to(torch.int8))
