"""The native decoder against a plain float32 Llama that keeps no cache, over shapes, dtypes, threads and kernels."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.native_models import (
    DTYPES,
    INTEGERS,
    MAX_ERROR,
    Part,
    attend,
    check_sequence,
    error,
    make_shape,
    make_weights,
    oracle_logits,
    rotary_table,
    round_matrices,
    run,
    shuffled_blocks,
    tokens,
    turn,
    widened,
)
from fixtures.rounded_products import load_bfloat16_oracle
from fixtures.waiting import DEADLINE_S
from numpy._core import _multiarray_umath
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal_kernels import native, native_library, native_limits, reference
from shoal_kernels.integers import IntegerWeight, round_weight
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.native import NativeDecoder
from shoal_replica.checkpoint import DEMO_MODEL, ensure_checkpoint
from shoal_replica.config import CacheConfig, ParallelConfig, SchedulerConfig
from shoal_replica.executor import NewSequence, ScheduledSequence, SchedulerOutput
from shoal_replica.memory_plan import plan_host
from shoal_replica.model import model_runner, torch_decoder
from shoal_replica.model.decoder import Decoder, make_decoder
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model.native_cpu_decoder import NativeCpuDecoder
from shoal_replica.model.sequence_table import SequenceTable
from shoal_replica.model.torch_decoder import TorchDecoder
from shoal_replica.model_config import ModelConfig
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")

KERNELS = native_library.supported_kernels()
HEAD_SIZES = [64, 80, 96, 128, 160, 256]
TASKS = Path("/proc/self/task")


@pytest.mark.parametrize("window", [None, 5])
def test_the_oracle_is_the_reference(window: int | None) -> None:
    """What the oracle computes at once, the reference computes token by token."""
    shape, length, pages = make_shape(num_heads=4), 37, [2, 0, 1]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, heads, 64, generator=generator) for heads in (4, 2, 2))
    table = rotary_table(shape)
    turned = turn(q, table[:length]), turn(k, table[:length])
    for actual, expected in zip(turned, reference.rotary_embedding(torch.arange(length), q, k, table), strict=True):
        torch.testing.assert_close(actual, expected)
    caches, slots = torch.zeros(2, 3, 2, 16, 64), [pages[i // 16] * 16 + i % 16 for i in range(length)]
    reference.write_kv(k, v, caches[0], caches[1], torch.tensor(slots))
    metadata = AttentionMetadata(
        query_start_loc=[0, length], seq_lens=[length], block_tables=torch.tensor([pages]),
        slot_mapping=torch.tensor(slots),
    )  # fmt: skip
    expected = reference.paged_attention(q, caches[0], caches[1], metadata, 64**-0.5, window)
    torch.testing.assert_close(attend(q, k, v, window), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_instruction_set(kernels: str, dtype: torch.dtype, num_threads: int) -> None:
    shape = make_shape(dtype=dtype, num_threads=num_threads)
    check_sequence(shape, make_weights(shape), [1, 130, 17, 1, 1, 33, 1], kernels)


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_integer_weights_on_every_instruction_set(kernels: str, bits: int, activation_bits: int) -> None:
    """Against the widened weights: 16-bit integer activations must cost no more accuracy than bf16 ones."""
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, num_threads=2)
    weights = round_matrices(make_weights(shape, qk_norm=True, biases=True), bits, activation_bits)
    check_sequence(shape, weights, [1, 130, 17, 1, 1, 33, 1], kernels)


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_activations_have_the_bits_that_were_asked_for(kernels: str, bits: int, activation_bits: int) -> None:
    """Without attention, which rounds its own way, an MLP is left whose rows are rounded to the same integers here and
    by the oracle: what the other rounding would give is several times as far away.
    """
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, num_layers=1, tied_embeddings=False)
    plain = make_weights(shape)
    plain["layers.0.o_proj.weight"].zero_()
    plain["layers.0.down_proj.weight"] *= 50
    weights, token_ids = round_matrices(plain, bits, activation_bits), tokens(shape, 90)
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels)
    found = run(decoder, Part(token_ids, 0, [3, 1, 4, 5, 9, 2]))
    with_8, with_16 = (
        error(found, oracle_logits(shape, widened(weights), torch.tensor(token_ids), rounds_rows=rounds))
        for rounds in (True, False)
    )
    assert with_8 < with_16 / 3 if activation_bits == 8 else with_16 < with_8 / 3


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_is_not_rounded_away(kernels: str, value: float, bits: int, activation_bits: int) -> None:
    """It becomes NaN, in its own rows alone."""
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, tied_embeddings=False)
    plain = make_weights(shape)
    weights = {**round_matrices(plain, bits, activation_bits)}
    plain["embed_tokens.weight"][3, 40] = value
    weights["embed_tokens.weight"] = plain["embed_tokens.weight"]
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels)
    logits = run(decoder, Part([5], 0, [0]), Part([3], 0, [1]), Part([1, 2, 4], 0, [2]))
    assert logits.isnan().all(1).tolist() == [False, True, False, False, False]
    assert logits[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_score_that_is_no_number_makes_no_weight(kernels: str, norm: str, dtype: torch.dtype) -> None:
    """Attention without it would be a plain average, and the logits finite."""
    shape = make_shape(dtype=dtype)
    weights = make_weights(shape, qk_norm=True)
    weights[f"layers.0.{norm}.weight"][5] = torch.nan
    logits = run(
        NativeDecoder(shape, weights.items(), rotary_table(shape), kernels), Part(list(range(40)), 0, [0, 1, 2])
    )
    assert logits.isnan().all()


OUT_OF_MEMORY = """
import resource, sys, torch
from fixtures.native_models import NativeDecoder, make_shape, make_weights, rotary_table
from shoal_kernels.draws import Draw

size = 2_000_000
shape = make_shape(num_threads=int(sys.argv[1]), vocab_size=size, hidden_size=32, intermediate_size=32, num_layers=1)
decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
logits = torch.zeros(64, size)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    decoder.draw(logits, list(range(64)), [Draw(1.0, 0.0, 0, 1.0, 0.5)] * 64)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(decoder.draw(logits[:2], [0, 1], [Draw(1.0, 0.0, 0, 1.0, 0.5)] * 2))
"""


FORKED = """
import os, sys
from fixtures.native_models import NativeDecoder, make_shape, make_weights, rotary_table

shape = make_shape(num_threads=2)
decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
pid = os.fork()
if pid == 0:
    decoder.close()
    sys.exit(0)
print(os.waitpid(pid, 0)[1])
"""


def test_a_forked_process_may_close_and_end() -> None:
    """It has none of the decoder's threads."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_step_that_runs_out_of_memory_is_an_error_and_the_next_one_runs(num_threads: int) -> None:
    """Whichever thread it happens in; the rest of the step is left out."""
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(num_threads)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip(), "it had memory enough"


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize("factor", [1e-30, 1e-35, 1e-37])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_too_small_to_be_scaled_count_as_nothing(
    kernels: str, factor: float, bits: int, activation_bits: int
) -> None:
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160)
    plain = make_weights(shape)
    plain["layers.1.gate_up_proj.weight"][160:] *= factor  # what the gates are multiplied with
    check_sequence(shape, round_matrices(plain, bits, activation_bits), [40, 1], kernels)


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
@pytest.mark.parametrize(("hidden", "vocab", "tied"), [(32, 83, True), (64, 96, False), (96, 33, False)])
def test_integer_weights_of_ragged_shapes(hidden: int, vocab: int, tied: bool, bits: int, activation_bits: int) -> None:
    shape = make_shape(
        dtype=torch.bfloat16, hidden_size=hidden, vocab_size=vocab, intermediate_size=32, tied_embeddings=tied
    )
    check_sequence(shape, round_matrices(make_weights(shape), bits, activation_bits), [40, 1, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes_groups_and_blocks(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Every head size with every group, and each of them with every block size."""
    block_size = (16, 32, 128)[(HEAD_SIZES.index(head_size) + group) % 3]
    shape = make_shape(
        dtype=dtype, head_size=head_size, num_heads=2 * group, block_size=block_size, num_layers=1, num_blocks=20
    )
    check_sequence(shape, make_weights(shape), [150, 1, 40, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 16, 300])
@pytest.mark.parametrize("length", [511, 513, 1600, 4096])
def test_long_sequences_and_windows(length: int, window: int | None, dtype: torch.dtype) -> None:
    shape = make_shape(
        dtype=dtype, num_layers=1, num_heads=3, num_kv_heads=1, sliding_window=window, max_positions=4096,
        num_blocks=260, num_threads=2, hidden_size=64,
    )  # fmt: skip
    # The last tokens come one at a time, to test the split over keys, and that at its boundaries.
    check_sequence(
        shape,
        make_weights(shape),
        [length - 600 if length > 600 else 1, length - 4 - max(length - 600, 1), 1, 1, 1, 1],
        num_checked=4,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernels", "length"), [*product(KERNELS, [40, 200, 201, 600, 1100]), *((name, 4096) for name in KERNELS[:1])]
)
def test_shapes_across(kernels: str, dtype: torch.dtype, length: int, request: pytest.FixtureRequest) -> None:
    """Head sizes, groups, block sizes, windows, threads and chunks together, drawn at random for each case; the case's
    name is the seed.
    """
    draw = random.Random(request.node.name)
    block_size, num_kv_heads = draw.choice([16, 32, 128]), 1 if length == 4096 else 2
    shape = make_shape(
        dtype=dtype, num_layers=1, head_size=draw.choice([64, 80, 96, 128]), block_size=block_size,
        num_kv_heads=num_kv_heads, num_heads=num_kv_heads * draw.choice([1, 2, 3] if length == 4096 else range(1, 9)),
        sliding_window=draw.choice([None, None, 1, 5, 16, 33, 130, 300]), num_threads=draw.choice([1, 2, 3]),
        max_positions=length, num_blocks=length // block_size + 3, hidden_size=draw.choice([64, 96]),
        intermediate_size=draw.choice([64, 104, 1216]),
    )  # fmt: skip
    chunks = [1] * 4
    while (left := length - sum(chunks)) > 0:
        chunks.insert(0, min(left, draw.choice([1, 17, 64, 150, 300, 500, 2000])))
    check_sequence(shape, make_weights(shape, draw.random() < 0.3, draw.random() < 0.3), chunks, kernels, num_checked=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("qk_norm", "biases", "tied"), [(True, False, False), (False, True, True), (True, True, False)]
)
def test_families(qk_norm: bool, biases: bool, tied: bool, dtype: torch.dtype) -> None:
    shape = make_shape(dtype=dtype, tied_embeddings=tied)
    check_sequence(shape, make_weights(shape, qk_norm, biases), [60, 1, 1])


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, None), *((torch.bfloat16, bits) for bits in INTEGERS)]
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_decoding_row_does_not_depend_on_its_company_or_the_threads(
    kernels: str, dtype: torch.dtype, bits: tuple[int, int] | None
) -> None:
    shape = make_shape(dtype=dtype, num_threads=1, max_positions=1024, num_blocks=120, intermediate_size=160)
    weights: dict[str, Tensor | IntegerWeight] = {**make_weights(shape)}
    if bits is not None:
        weights = round_matrices(make_weights(shape), *bits)
    prompts = [tokens(shape, length, seed=length) for length in (700, 20, 33, 1, 90)]
    blocks = [list(range(20 * i, 20 * i + 20)) for i in range(5)]
    blocks[0] = list(range(70, 120))
    blocks[1:] = [list(range(10 * i, 10 * i + 10)) for i in range(4)]
    alone = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels=kernels)
    together = NativeDecoder(replace(shape, num_threads=2), weights.items(), rotary_table(shape), kernels=kernels)
    for decoder in (alone, together):
        for prompt, held in zip(prompts, blocks, strict=True):
            run(decoder, Part(prompt, 0, held))
    last = [Part([7], len(prompt), held) for prompt, held in zip(prompts, blocks, strict=True)]
    assert torch.equal(run(together, *last), torch.cat([run(alone, part) for part in last]))


def wide_rows() -> dict[str, Tensor]:
    """Rows of weights whose exponents lie as close together and as far apart as any may."""
    generator = torch.Generator().manual_seed(5)

    def spread(low: float, high: float) -> Tensor:
        exponents = torch.rand(96, generator=generator) * (high - low) + low
        return torch.randn(96, generator=generator).sign() * 2**exponents

    near = spread(-8, 0)
    return {
        "near": near,
        "half zeros": near * (torch.arange(96) % 2),
        "all zeros": torch.zeros(96),
        "minus zeros": -torch.zeros(96),
        "within 13 octaves": spread(-13.5, -0.5),
        "within 20 octaves": spread(-20, 0),
        "subnormal beside large": torch.where(torch.arange(96) % 3 == 0, 2.0**-130, near),
        "subnormal alone": spread(-132, -127),
        "least normal": spread(-126, -119),
        "all there are": spread(-126, 60),
    }


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_weight_is_what_it_was_beside_any_others(kernels: str) -> None:
    """How weights are stored depends on their neighbours. Their products do not: the logits of the other rows stay the
    same to the bit, and that of the row that changes is close to the oracle's.
    """
    shape = make_shape(dtype=torch.bfloat16, tied_embeddings=False)
    weights, token_ids, odd = make_weights(shape), tokens(shape, 40), 5
    others = torch.arange(shape.vocab_size) != odd
    expected = None
    for name, row in wide_rows().items():
        head = weights["lm_head.weight"].clone()
        head[odd] = row.bfloat16()
        decoder = NativeDecoder(shape, {**weights, "lm_head.weight": head}.items(), rotary_table(shape), kernels)
        logits = torch.cat(
            [run(decoder, Part(ids, start, [7, 2, 3])) for ids, start in [(token_ids[:1], 0), (token_ids[1:], 1)]]
        )
        decoder.close()
        expected = logits if expected is None else expected
        torch.testing.assert_close(logits[:, others], expected[:, others], rtol=0, atol=0, msg=name)
        oracle = oracle_logits(shape, {**weights, "lm_head.weight": head}, torch.tensor(token_ids))[:, odd]
        scale = oracle.std().clamp_min(2.0**-120)  # products of bf16 pairs treat subnormals as 0
        assert float((logits[:, odd] - oracle).abs().max() / scale) < 10 * MAX_ERROR[torch.bfloat16], name


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_token_is_looked_up_as_it_was(kernels: str) -> None:
    """However the embedding table stores it because of a neighbouring row that no token looks up: one of narrow or wide
    exponents, or of zeros.
    """
    neighbours = [wide_rows()[name] for name in ("near", "all zeros", "within 20 octaves", "all there are")]
    shape = make_shape(dtype=torch.bfloat16, tied_embeddings=False)
    weights, token_ids, odd = make_weights(shape), [*range(5), *range(6, 16)], 5
    for near in wide_rows():
        table = weights["embed_tokens.weight"].clone()
        table[7] = wide_rows()[near].bfloat16()
        found = []
        for row in neighbours:
            table[odd] = row.bfloat16()
            parameters = {**weights, "embed_tokens.weight": table}.items()
            decoder = NativeDecoder(shape, parameters, rotary_table(shape), kernels)
            found.append(run(decoder, *(Part([token], 0, [i]) for i, token in enumerate(token_ids))))
            decoder.close()
        assert all(torch.equal(logits, found[0]) for logits in found), near


@pytest.mark.parametrize(("bits", "size"), [(None, 1216), (None, 2752), *((bits, 1216) for bits in INTEGERS)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_prompt_does_not_depend_on_its_company(kernels: str, bits: tuple[int, int] | None, size: int) -> None:
    """Sums are long enough to be computed in parts; rows come in tiles of any height, and are more than are multiplied
    at once. With the longest sums, as few rows as possible are widened at a time, where rows are widened.
    """
    shape = make_shape(dtype=torch.bfloat16, num_blocks=60, intermediate_size=size, num_layers=1)
    weights: dict[str, Tensor | IntegerWeight] = {**make_weights(shape)}
    if bits is not None:
        weights = round_matrices(make_weights(shape), *bits)
    lengths, parts, first = (2, 3, 17, 33, 47, 70, 400), [], 0
    for length in lengths:
        held = list(range(first, first + length // 16 + 1))
        parts.append(Part(tokens(shape, length, seed=length), 0, held))
        first += len(held)
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels=kernels)
    alone = torch.cat([run(decoder, part) for part in parts])
    assert torch.equal(run(decoder, *parts), alone)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", [1, 3, 20, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_prompt_does_not_depend_on_the_threads(
    kernels: str, dtype: torch.dtype, group: int, window: int | None
) -> None:
    """They share its attention in units whose size depends on their number: one piece, several, or a remainder, too."""
    shape = make_shape(
        dtype=dtype, num_layers=1, num_heads=2 * group, head_size=32, sliding_window=window, max_positions=1024,
        num_blocks=100, num_threads=1,
    )  # fmt: skip
    weights, parts, first = make_weights(shape), [], 0
    for length in (3, 31, 65, 97, 130, 700):
        held = list(range(first, first + length // 16 + 1))
        parts.append(Part(tokens(shape, length, seed=length), 0, held))
        first += len(held)
    logits = [
        run(NativeDecoder(s, weights.items(), rotary_table(s), kernels=kernels), *parts)
        for s in (shape, replace(shape, num_threads=2), replace(shape, num_threads=5))
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("window", [None, 40, 650])
@pytest.mark.parametrize("group", [1, 3, 13, 20])  # 13 rows exceed a tile of vectors, 20 a tile of registers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_that_share_blocks_decode_as_if_alone(
    kernels: str, dtype: torch.dtype, group: int, window: int | None
) -> None:
    """Two shared prefixes, one beginning with the other, and a lone sequence; below and beyond the split over keys."""
    shape = make_shape(
        dtype=dtype, num_layers=1, num_heads=2 * group, head_size=32, sliding_window=window, max_positions=1024,
        num_blocks=140, num_threads=2,
    )  # fmt: skip
    weights, prompt = make_weights(shape), tokens(shape, 800)
    together, alone = (
        NativeDecoder(s, weights.items(), rotary_table(s), kernels=kernels)
        for s in (shape, replace(shape, num_threads=1))
    )
    common = shuffled_blocks(shape)[:50]
    own = [block for block in range(shape.num_blocks) if block not in common]
    parts = []
    for i, (shared, length) in enumerate(
        [(640, 640), (304, 310), (640, 700), (0, 90), (800, 800), (304, 400), (640, 645)]
    ):
        held = common[: shared // 16] + own[7 * i : 7 * i + 7]
        rest = tokens(shape, length - shared, seed=i)
        for decoder in (together, alone):
            if shared:
                run(decoder, Part(prompt[:shared], 0, held))
            if rest:
                run(decoder, Part(rest, shared, held))
        parts.append(Part([i], length, held))
    logits = run(together, *parts)
    assert torch.equal(logits, torch.cat([run(alone, part) for part in parts]))
    for expected, part in zip(logits, parts, strict=True):
        assert torch.equal(run(together, part)[0], expected)


def test_rows_that_are_not_sampled_change_nothing() -> None:
    """Rows are sampled in any order, twice, or not at all; what all left in the blocks serves the steps after."""
    shape = make_shape(dtype=torch.bfloat16, num_threads=2)
    weights = make_weights(shape)
    whole, few = (NativeDecoder(shape, weights.items(), rotary_table(shape)) for _ in range(2))
    first = (Part(tokens(shape, 130), 0, [*range(9)]), Part(tokens(shape, 20), 0, [9, 10]))
    every = run(whole, *first)
    assert torch.equal(run(few, *first, rows=[149, 3, 129, 3]), every[[149, 3, 129, 3]])
    last = Part([5], 130, [*range(9)])
    assert run(few, Part([8], 20, [9, 10]), rows=[]).shape == (0, shape.vocab_size)
    assert torch.equal(run(few, last), run(whole, last))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1, 33, 83, 1000])
def test_the_largest_logits_and_their_first_places(vocab: int, num_threads: int) -> None:
    shape = make_shape(vocab_size=vocab, num_threads=num_threads, tied_embeddings=False)
    weights = make_weights(shape)
    weights["lm_head.weight"][vocab // 2 :] = weights["lm_head.weight"][: vocab - vocab // 2].clone()  # ties
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
    for part in (Part(tokens(shape, 20), 0, [0, 1]), Part([0], 20, [0, 1])):
        logits = run(decoder, part)
        assert decoder.maxima.largest == logits.amax(dim=-1).tolist()
        assert decoder.maxima.places == [row.index(max(row)) for row in logits.tolist()]
    bad = weights["lm_head.weight"].clone()
    bad[vocab // 2 :] = torch.nan
    decoder = NativeDecoder(shape, {**weights, "lm_head.weight": bad}.items(), rotary_table(shape))
    run(decoder, Part([0, 0], 0, [0]))
    assert np.isnan(decoder.maxima.largest).all()
    assert decoder.maxima.places == [vocab // 2] * 2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("vocab", "num_threads"), [(1, 2), (33, 1), (83, 3), (1000, 2)])
def test_maxima_without_logits_are_those_of_the_logits(vocab: int, num_threads: int, kernels: str) -> None:
    """To the bit, with heads made to mislead the 8-bit weights, and for more rows than these are used for."""
    shape = make_shape(dtype=torch.bfloat16, vocab_size=vocab, num_threads=num_threads, tied_embeddings=False)
    weights = make_weights(shape)
    head, generator = weights["lm_head.weight"], torch.Generator().manual_seed(3)
    noise = torch.randn(head.shape, generator=generator).bfloat16()
    equals, lone, faint, bad, endless, long = (head.clone() for _ in range(6))
    equals[vocab // 2 :] = head[: vocab - vocab // 2]
    lone[:, 7] *= 300  # leaves the rest of its group next to nothing of 8 bits
    faint[vocab // 3] *= 100  # the largest or the least; its first group is too small for a scale of its own
    faint[:, :32] = 0
    faint[:, 3] = 1e-38
    bad[vocab // 2] = torch.nan
    endless[vocab // 3] = torch.inf
    long[vocab // 3] *= 1e7
    heads = [head, equals, lone, faint, bad, endless, long, head[:1] + noise / 256, torch.zeros_like(head)]
    heads += [head * 1e-23, head * 1e-38]
    part = Part(tokens(shape, 20), 0, [0, 1])
    for weight in heads:
        many = ([*range(20)],) if weight is head else ()  # for which no kernels read 8-bit weights
        for rows in ([19], [3, 19], [*range(3)], [*range(4)], [*range(5)], [*range(8)], *many):
            # A new decoder each time: one for which such maxima were of no use does not try again at once.
            decoder = NativeDecoder(shape, {**weights, "lm_head.weight": weight}.items(), rotary_table(shape), kernels)
            logits = run(decoder, part, rows=rows)
            expected = decoder.maxima
            assert run(decoder, part, rows=rows, wants_maxima_alone=True).shape == (0, vocab)
            assert decoder.maxima.places == expected.places
            assert np.array_equal(decoder.maxima.largest, expected.largest, equal_nan=True)
            assert torch.equal(run(decoder, part, rows=rows).nan_to_num(), logits.nan_to_num())
            decoder.close()


def test_maxima_without_logits_of_a_head_that_8_bits_cannot_tell_apart() -> None:
    """For some steps the decoder then does not try again, and afterwards it does: the same maxima throughout."""
    shape = make_shape(dtype=torch.bfloat16, vocab_size=400, num_threads=2, tied_embeddings=False)
    weights = make_weights(shape)
    head = weights["lm_head.weight"]
    head[:] = head[:1] + head / 256
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
    run(decoder, Part([5], 0, [0]))
    expected = decoder.maxima
    for _ in range(140):
        run(decoder, Part([5], 0, [0]), wants_maxima_alone=True)
        assert decoder.maxima == expected
    decoder.close()


def test_maxima_without_logits_of_a_row_that_is_not_finite() -> None:
    shape = make_shape(dtype=torch.bfloat16, num_threads=2)
    for value in (torch.nan, torch.inf, 1e38):
        weights = make_weights(shape)
        weights["norm.weight"] = weights["norm.weight"] * value
        decoder = NativeDecoder(shape, weights.items(), rotary_table(shape))
        run(decoder, Part([5], 0, [0]))
        expected = decoder.maxima
        run(decoder, Part([5], 0, [0]), wants_maxima_alone=True)
        assert decoder.maxima.places == expected.places
        assert np.array_equal(decoder.maxima.largest, expected.largest, equal_nan=True)


def test_a_step_again_goes_by_what_its_arrays_hold_by_now() -> None:
    shape = make_shape(num_threads=2)
    weights, size = make_weights(shape), shape.block_size
    goes_on, fresh = (NativeDecoder(shape, weights.items(), rotary_table(shape)) for _ in range(2))
    for decoder in (goes_on, fresh):
        run(decoder, Part(tokens(shape, size - 1), 0, [3]))
    input_ids, positions, slots = np.array([5]), np.array([size - 1]), np.array([4 * size - 1])
    block_tables, sample_rows = np.array([[3, 0]], np.int32), np.zeros(1, np.int64)
    first = goes_on.forward(
        input_ids=input_ids, positions=positions, query_start_loc=np.array([0, 1], np.int32), seq_lens=[size],
        block_tables=block_tables, slot_mapping=slots, sample_rows=sample_rows,
    ).clone()  # fmt: skip
    assert torch.equal(first, run(fresh, Part([5], size - 1, [3])))
    input_ids[0], positions[0], slots[0], block_tables[0, 1] = 7, size, size, 1
    assert torch.equal(goes_on.forward_again([size + 1]), run(fresh, Part([7], size, [3, 1])))


def test_nothing_of_an_earlier_sequence_shows_in_a_reused_block() -> None:
    """The earlier one even left NaN there."""
    shape = make_shape(dtype=torch.bfloat16)
    weights = make_weights(shape)
    poisoned = weights["embed_tokens.weight"].clone()
    poisoned[3] = torch.nan
    weights = {**weights, "embed_tokens.weight": poisoned, "lm_head.weight": poisoned}
    used, fresh = (NativeDecoder(shape, weights.items(), rotary_table(shape)) for _ in range(2))
    assert run(used, Part([3] * 48, 0, [0, 1, 2])).isnan().all()
    clean = [t for t in tokens(shape, 40) if t != 3]
    for start, end in ((0, 18), (18, 19), (19, len(clean))):
        part = Part(clean[start:end], start, [0, 1, 2])
        # Token 3's own logit is NaN by its poisoned row of the head.
        keep = [t for t in range(shape.vocab_size) if t != 3]
        assert torch.equal(run(used, part)[:, keep], run(fresh, part)[:, keep])


# An odd number of pages of 16, in one tile of keys or more, in the last part of its head.
@pytest.mark.parametrize(("length", "part_begin"), [(10, 0), (40, 0), (300, 272)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_of_a_neighbour_shows(kernels: str, length: int, part_begin: int) -> None:
    """Not even that it is NaN: pages that are prefetched, or read to fill a register, belong to the next sequence."""
    shape = make_shape(dtype=torch.bfloat16)
    weights = make_weights(shape)
    poisoned = weights["embed_tokens.weight"].clone()
    poisoned[3] = torch.nan
    weights = {**weights, "embed_tokens.weight": poisoned, "lm_head.weight": poisoned}
    beside, alone = (NativeDecoder(shape, weights.items(), rotary_table(shape), kernels) for _ in range(2))
    clean = [t if t != 3 else 4 for t in tokens(shape, length)]
    blocks, keep = list(range(20)), [t for t in range(shape.vocab_size) if t != 3]  # 3's row of the head is NaN
    if part_begin > 0:
        for decoder in (beside, alone):
            run(decoder, Part(clean[:part_begin], 0, blocks))
    part = Part(clean[part_begin:], part_begin, blocks)
    logits = run(beside, part, Part([3] * 40, 0, [20, 21, 22]))
    assert logits[len(part.token_ids) :].isnan().all()
    assert torch.equal(logits[: len(part.token_ids), keep], run(alone, part)[:, keep])


@pytest.mark.parametrize("head_size", [64, 48])  # a whole number of vectors, and not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_pages_that_fill_at_once_hold_what_they_do_token_by_token(
    kernels: str, dtype: torch.dtype, head_size: int
) -> None:
    """Judged by the logits of what follows, the same to the bit; in blocks of two pages that lie in no order."""
    shape = make_shape(dtype=dtype, head_size=head_size, block_size=32)
    weights, blocks = make_weights(shape), [5, 2, 7]
    at_once, by_token = (NativeDecoder(shape, weights.items(), rotary_table(shape), kernels) for _ in range(2))
    prompt = tokens(shape, 75)
    run(at_once, Part(prompt[:70], 0, blocks))
    for i in range(70):
        run(by_token, Part(prompt[i : i + 1], i, blocks))
    rest = Part(prompt[70:], 70, blocks)
    assert torch.equal(run(at_once, rest), run(by_token, rest))


def test_copied_blocks_take_what_their_sources_were() -> None:
    shape = make_shape(dtype=torch.bfloat16)
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    prompt = tokens(shape, 32)
    run(decoder, Part(prompt, 0, [4, 5]))
    expected = run(decoder, Part([9], 32, [4, 5, 6]))
    decoder.copy_blocks([(5, 4), (4, 7)])
    assert torch.equal(run(decoder, Part([9], 32, [7, 4, 6])), expected)
    assert not torch.equal(run(decoder, Part([9], 32, [4, 5, 6])), expected)
    decoder.copy_blocks([(7, 2), (4, 3)])
    assert torch.equal(run(decoder, Part([9], 32, [2, 3, 6])), expected), "where none is both read and written"


@pytest.mark.parametrize("kernels", native_library.supported_kernels())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_one_decoder_serve_another(kernels: str, dtype: torch.dtype) -> None:
    shape = make_shape(dtype=dtype)
    one, other = (
        NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape), kernels=kernels) for _ in range(2)
    )
    run(one, Part(tokens(shape, 32), 0, [4, 5]))
    expected = run(one, Part([9], 32, [4, 5, 6]))
    contents = one.read_blocks([5, 4])
    assert contents.nbytes == 2 * one.block_bytes
    other.write_blocks([7, 0], contents)
    assert torch.equal(run(other, Part([9], 32, [0, 7, 6])), expected)
    for call in (
        lambda: one.read_blocks([shape.num_blocks]),
        lambda: one.write_blocks([-1], contents[: one.block_bytes]),
        lambda: one.write_blocks([1], contents),
    ):
        with pytest.raises(ValueError, match=r"beyond the pool|must be 1 times"):
            call()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part([83], 0, [0]), "token id"),
        (Part([-1], 0, [0]), "token id"),
        (Part([1], 512, list(range(33))), "position"),
        (Part([1], 0, [40]), "slot"),
        (Part([1], 16, [40, 0]), "block id"),
    ],
)
def test_what_does_not_exist_is_refused(part: Part, message: str) -> None:
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    with pytest.raises(ValueError, match=message):
        run(decoder, part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": [0, 1]}, "positions: has 2 elements; must have 3"),
        ({"slot_mapping": [0]}, "slot_mapping: has 1 elements"),
        ({"query_start_loc": [0]}, "must be of 1 sequences"),
        ({"block_tables": [[0, 1], [2, 3]]}, "must be of 1 sequences"),
        ({"query_start_loc": [0, 4]}, "query_start_loc"),
        ({"query_start_loc": [1, 3]}, "query_start_loc"),
        ({"seq_lens": [2]}, "seq_lens"),
        ({"seq_lens": [-1]}, "seq_lens"),
        ({"seq_lens": [33]}, "block_tables"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(change: dict[str, list[Any]], message: str) -> None:
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    step = {"positions": [0, 1, 2], "slot_mapping": [0, 1, 2], "query_start_loc": [0, 3], "seq_lens": [3]}
    given = step | {"block_tables": [[0, 1]]} | change
    with pytest.raises(ValueError, match=message):
        decoder.forward(
            input_ids=np.array([1, 2, 3]),
            positions=np.array(given["positions"]),
            slot_mapping=np.array(given["slot_mapping"]),
            query_start_loc=given["query_start_loc"],
            seq_lens=given["seq_lens"],
            block_tables=np.array(given["block_tables"], np.int32),
            sample_rows=[2],
        )


def test_shapes_that_are_not_covered() -> None:
    """What can be said without the library, and what the library itself says."""
    shape = make_shape()
    asked = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "block_size")
    known = {name: getattr(shape, name) for name in asked} | {"dtype": "float32"}
    assert native_limits.refusal(**known) is None
    assert "dtype float16" in (native_limits.refusal(**known | {"dtype": "float16"}) or "")
    for changes in (
        {"head_size": 24}, {"head_size": 272}, {"block_size": 8}, {"hidden_size": 95}, {"intermediate_size": 103},
        {"num_heads": 97, "num_kv_heads": 1},
    ):  # fmt: skip
        assert native_limits.refusal(**known | changes) is not None
        with pytest.raises(ValueError, match=next(iter(changes))):
            NativeDecoder(replace(shape, **changes), {}.items(), rotary_table(shape))
    with pytest.raises(ValueError, match="num_layers"):
        NativeDecoder(replace(shape, num_layers=0), {}.items(), rotary_table(shape))
    with pytest.raises(ValueError, match="does not run"):
        NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape), "sse9")
    incomplete = {name: weight for name, weight in make_weights(shape).items() if name != "layers.1.o_proj.weight"}
    with pytest.raises(ValueError, match=r"'layers\.1\.o_proj\.weight' is missing"):
        NativeDecoder(shape, incomplete.items(), rotary_table(shape))
    with pytest.raises(ValueError, match="values"):
        NativeDecoder(shape, {**make_weights(shape), "norm.weight": torch.ones(3)}.items(), rotary_table(shape))


def test_integers_that_do_not_fit_the_decoder() -> None:
    shape = make_shape(dtype=torch.bfloat16)
    weights = make_weights(shape)
    for bad, message in (
        ({"layers.0.o_proj.weight": round_weight(weights["layers.0.qkv_proj.weight"], 8)}, "values"),
        ({"norm.weight": round_weight(torch.ones(3, 32), 8)}, "only matrices"),
        ({"layers.0.o_proj.weight": replace(round_weight(torch.ones(96, 384), 4), minimums=None)}, "minimums"),
        ({"layers.0.o_proj.weight": replace(round_weight(torch.ones(96, 384), 8), bits=5)}, "bits"),
        (
            {"layers.0.o_proj.weight": replace(round_weight(torch.ones(96, 384), 8), activation_bits=4)},
            "activation_bits",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            NativeDecoder(shape, {**weights, **bad}.items(), rotary_table(shape))
    shape = make_shape(dtype=torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        NativeDecoder(
            shape, round_matrices(make_weights(replace(shape, intermediate_size=160)), 8).items(), rotary_table(shape)
        )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_progress_differs_while_a_step_goes_on(num_threads: int) -> None:
    """This tells a long step from one that hangs: another thread sees numbers that no step ends with."""
    shape = make_shape(num_threads=num_threads)
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    part = Part(tokens(shape, 500), 0, shuffled_blocks(shape))
    is_over, seen = threading.Event(), set[int]()

    def watch() -> None:
        while not is_over.is_set():
            seen.add(decoder.progress)

    watcher = threading.Thread(target=watch)
    ends, deadline = [decoder.progress], time.monotonic() + DEADLINE_S
    watcher.start()
    while not seen.difference(ends) and time.monotonic() < deadline:
        run(decoder, part)
        ends.append(decoder.progress)
    is_over.set()
    watcher.join()
    assert seen.difference(ends)
    assert len(set(ends)) == len(ends)
    decoder.close()


def native_threads() -> set[str]:
    """Those that a decoder starts. Others, which the libraries start and end when they like, may end while listed."""
    names = {}
    for task in os.listdir(TASKS):
        with contextlib.suppress(OSError):
            names[task] = (TASKS / task / "comm").read_text().strip()
    return {task for task, name in names.items() if name in ("shoal-helper", "shoal-pages")}


def are_asleep(tasks: set[str]) -> bool:
    return all((TASKS / task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0)
    assert condition()


def test_threads_sleep_when_no_step_comes() -> None:
    """Helpers linger briefly after a step, in case another comes; a replica without work takes no core."""
    before = native_threads()
    shape = make_shape(num_threads=3)
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    run(decoder, Part([1], 0, [0]))
    own = native_threads() - before
    assert len(own) == 3  # two helpers, and the thread that makes the pool's pages
    wait_until(lambda: are_asleep(own))
    run(decoder, Part([2], 1, [0]))
    decoder.close()
    wait_until(lambda: not own & native_threads())  # a joined thread may be listed a moment longer


def resident_bytes(pool_bytes: int) -> int:
    """Resident bytes of the anonymous mappings that are large enough to hold such a pool."""
    maps = re.split(r"^[0-9a-f]+-", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    own = [text for text in maps if len(text.partition("\n")[0].split()) == 5]
    sizes = (tuple(int(n) << 10 for n in re.findall(r"^(?:Size|Rss): +(\d+)", text, re.MULTILINE)) for text in own)
    return sum(rss for size, rss in sizes if size >= pool_bytes)


def wait_until_made(pool_bytes: int, expected: int, maker: set[str]) -> None:
    """Wait until ``expected`` bytes of the pool are resident and stay so, give or take a huge page per layer (7)."""
    pages = 7 * (2 << 20)
    wait_until(lambda: resident_bytes(pool_bytes) >= expected - pages)
    wait_until(lambda: are_asleep(maker))
    assert resident_bytes(pool_bytes) <= expected + pages


def can_populate() -> bool:
    with contextlib.suppress(OSError), mmap.mmap(-1, mmap.PAGESIZE) as memory:
        memory.madvise(23)  # MADV_POPULATE_WRITE
        return True
    return False


needs_populate = pytest.mark.skipif(not can_populate(), reason="the system makes pages at their first use alone")


@needs_populate
def test_memory_of_blocks_is_there_before_they_are_used() -> None:
    """As much as is used next, and not the whole pool; layers do not begin at page boundaries."""
    shape = make_shape(num_layers=7, num_blocks=6001)
    bytes_of_block = 7 * 16 * 2 * 2 * 64 * 4  # layers, tokens, keys and values, heads, size, float32
    pool_bytes, in_use, ahead = 6001 * bytes_of_block, 2000 * bytes_of_block, 128 << 20
    before = native_threads()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    maker = native_threads() - before
    assert maker
    run(decoder, Part([1], 0, [0]))
    wait_until_made(pool_bytes, ahead, maker)
    run(decoder, Part([1], 0, [1999]))
    wait_until_made(pool_bytes, in_use + ahead, maker)
    decoder.close()


@needs_populate
def test_warming_up_makes_no_more_than_the_beginning_of_the_pool(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(make_checkpoint("llama-llama3-rope", tmp_path))
    num_blocks = (512 << 20) // model.block_bytes(16)
    before = native_threads()
    runner = ModelRunner(model, CacheConfig(num_blocks=num_blocks, block_size=16), ParallelConfig())
    maker = native_threads() - before
    assert maker
    runner.warm_up()
    wait_until_made(num_blocks * model.block_bytes(16), 128 << 20, maker)
    runner.close()


def test_a_library_of_other_sources_says_how_to_build_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "LIBRARY", Path(_multiarray_umath.__file__))
    with pytest.raises(
        RuntimeError, match=r"_multiarray_umath.*built from other sources.*shoal_decoder_create.*build_ext --inplace"
    ):
        native_library._load()


def test_a_library_with_other_structs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions may have the same names, and would read beyond what they are given."""
    monkeypatch.setattr(native_library, "CStep", native_library.CExchange)
    with pytest.raises(
        RuntimeError, match=r"built from other sources \(structs of .* bytes, not .*build_ext --inplace"
    ):
        native_library._load()


def test_what_is_no_library_of_this_machine_says_so(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(RuntimeError, match=r"_native.so cannot be loaded on this machine \(.*build_ext --inplace"):
        native_library._load(path)


def test_closed_decoder() -> None:
    shape = make_shape()
    decoder = NativeDecoder(shape, make_weights(shape).items(), rotary_table(shape))
    decoder.close()
    decoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(decoder, Part([1], 0, [0]))


def test_the_runner_generates_alike_with_torch_and_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_folder(make_checkpoint("llama-llama3-rope", tmp_path))
    cache, parallel = CacheConfig(num_blocks=16, block_size=16), ParallelConfig()
    (prompt,) = make_prompts([37])
    generated = []
    for kind in (NativeCpuDecoder, TorchDecoder):
        monkeypatch.setattr(model_runner, "make_decoder", lambda *args, kind=kind: kind(*args[:3]))
        runner = ModelRunner(model, cache, parallel)
        runner.warm_up()
        new = NewSequence(0, tuple(prompt), len(prompt), 0, (2, 9, 4, 1), SamplingParams(temperature=0.0), 0)
        step = SchedulerOutput(0, (ScheduledSequence(0, 0, len(prompt), True),), (new,))
        token_ids = []
        for i in range(20):
            token_ids += [s.token_id for s in runner.execute(step).sampled]
            step = SchedulerOutput(i + 1, (ScheduledSequence(0, len(prompt) + i, 1, True),))
        runner.close()
        generated.append(token_ids)
    assert generated[0] == generated[1]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_alike_with_torch_and_native(tmp_path: Path, quantization: str) -> None:
    folder = make_checkpoint("llama-llama3-rope", tmp_path)
    cache, parallel = CacheConfig(num_blocks=16, block_size=16), ParallelConfig()
    # The same weights in both dtypes, so that both round to the same integers.
    stored = load_file(Path(folder) / "model.safetensors")
    save_file({name: t.bfloat16().float() for name, t in stored.items()}, Path(folder) / "model.safetensors")
    exact = ModelConfig.from_folder(folder, dtype="float32", quantization=quantization)
    (prompt,) = make_prompts([37])
    expected = decoder_logits(make_decoder(exact, cache, parallel), prompt, 16)
    decoder = make_decoder(replace(exact, dtype="bfloat16"), cache, parallel)
    assert isinstance(decoder, NativeCpuDecoder)
    assert error(decoder_logits(decoder, prompt, 16), expected) < MAX_ERROR[torch.bfloat16]
    plain = decoder_logits(make_decoder(replace(exact, quantization="none"), cache, parallel), prompt, 16)
    assert error(plain, expected) > MAX_ERROR[torch.bfloat16]


def test_torch_serves_what_native_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_folder(make_checkpoint("llama-llama3-rope", tmp_path))
    cache = CacheConfig(num_blocks=16, block_size=16)
    assert isinstance(make_decoder(model, cache, ParallelConfig()), NativeCpuDecoder)
    assert isinstance(make_decoder(model, replace(cache, block_size=8), ParallelConfig()), TorchDecoder)
    monkeypatch.setattr(native_library, "_LIBRARY", None)
    assert isinstance(make_decoder(model, cache, ParallelConfig()), TorchDecoder)


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_native", [True, False])
def test_memory_is_planned_for_the_kernels_that_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    has_native: bool, dtype: str, quantization: str,
) -> None:  # fmt: skip
    """The log says which they are, with a warning if they are not the native ones."""
    caplog.set_level(logging.INFO, "shoal_replica.model.decoder")
    folder = make_checkpoint("llama", tmp_path)  # its head is tied to its embedding
    model, cache = ModelConfig.from_folder(folder, dtype, quantization=quantization), CacheConfig(num_blocks=16)
    if not has_native:
        monkeypatch.setattr(native_library, "_LIBRARY", None)
    held: dict[str, Tensor] = {}
    monkeypatch.setattr(torch_decoder, "LlamaDecoder", lambda model, weights, *rest: held.update(weights))
    plan = plan_host(model, SchedulerConfig(), ParallelConfig(), cache, 1 << 30)
    decoder = make_decoder(model, cache, ParallelConfig())
    (said,) = caplog.records
    if isinstance(decoder, NativeCpuDecoder):
        assert has_native
        assert plan.kernels == decoder.kernels == KERNELS[0]
        assert (said.levelname, plan.kernels in said.getMessage()) == ("INFO", True)
        return
    assert not has_native or (dtype, quantization) == ("float32", "int4")
    assert plan.kernels == f"torch ({said.getMessage().partition(': ')[2]})"
    assert said.levelname == "WARNING"
    assert plan.weights == sum({tensor.data_ptr(): tensor.nbytes for tensor in held.values()}.values())


def decoder_logits(decoder: Decoder, token_ids: Sequence[int], block_size: int) -> Tensor:
    """Logits of every token of one sequence."""
    length = len(token_ids)
    table = SequenceTable(length, block_size)
    blocks = tuple(range(-(-length // block_size)))
    table.add(NewSequence(0, tuple(token_ids), length, 0, blocks, SamplingParams(), 0))
    return decoder.compute(table.arrays((ScheduledSequence(0, 0, length, True),)), range(length))


@pytest.mark.demo_model
def test_accuracy_of_bf16_and_of_integer_weights() -> None:
    """Mean KL of next-token distributions against float32 over 2 048 positions of English text.

    The demo checkpoint was made from 4-bit weights with minimums, so int4 finds its grid again and comes out best.
    """
    folder = str(ensure_checkpoint(DEMO_MODEL))
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    token_ids = Tokenizer.from_folder(folder).encode(text)[:2048]
    assert len(token_ids) == 2048
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = load_bfloat16_oracle(folder)
    cache = CacheConfig(num_blocks=16, block_size=32)
    ours = {
        name: NativeCpuDecoder(
            ModelConfig.from_folder(folder, dtype="bfloat16", quantization=name), cache, ParallelConfig()
        )
        for name in ("none", "int8", "int4", "w8a8", "w4a8")
    }
    divergence = dict.fromkeys(("transformers", *ours), 0.0)
    with torch.inference_mode():
        for start in range(0, len(token_ids), 512):
            part = token_ids[start : start + 512]
            expected = exact(torch.tensor([part])).logits[0].log_softmax(-1)
            shares = expected.exp()
            logits = {"transformers": rounded(torch.tensor([part])).logits[0].float()}
            logits |= {name: decoder_logits(decoder, part, 32) for name, decoder in ours.items()}
            for name, found in logits.items():
                divergence[name] += float((shares * (expected - found.log_softmax(-1))).sum()) / len(token_ids)
    assert divergence["none"] <= divergence["transformers"]
    assert divergence["int8"] < 4e-3
    assert divergence["int4"] < 4e-3
    assert divergence["w8a8"] < 8e-3
    assert divergence["w4a8"] < 8e-3
