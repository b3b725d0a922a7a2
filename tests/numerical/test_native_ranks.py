"""Native decoders of several ranks, as threads: sums in shared memory or carried by a function, and a missing rank."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.rank_threads import ThreadedRanks
from fixtures.serving_story import CACHE, run
from fixtures.tiny_adapters import make_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, make_prompts
from torch import Tensor

from shoal_kernels import native, native_library
from shoal_kernels.exchange import CarriedExchange, LostRank, SharedExchange, shared_bytes
from shoal_kernels.native import NativeDecoder
from shoal_kernels.native_shape import DecoderShape
from shoal_replica.adapter_folder import read_adapter
from shoal_replica.config import ParallelConfig
from shoal_replica.executor import NewSequence, ScheduledSequence, finish
from shoal_replica.model import native_cpu_decoder
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model.native_cpu_decoder import NativeCpuDecoder
from shoal_replica.model.sequence_table import SequenceTable
from shoal_replica.model.shared_memory import share
from shoal_replica.model.torch_decoder import TorchDecoder
from shoal_replica.model_config import ModelConfig
from shoal_replica.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native kernels were not built")
MAX_BF16_ERROR = 4e-2  # relative to the spread of the logits, as for one rank


def generate(
    model: ModelConfig, size: int, stages: int, *, is_shared: bool, kind: type, num_threads: int = 1
) -> dict[str, list[int]]:
    parallel = ParallelConfig(tensor_parallel_size=size, pipeline_parallel_size=stages, num_threads=num_threads)
    ranks = ThreadedRanks(model, CACHE, parallel, is_shared)
    assert all(isinstance(runner._decoder, kind) for runner in ranks.runners)
    tokens, _ = run(ranks)
    ranks.close()
    return tokens


@pytest.mark.parametrize("family", ["llama-9-heads", "gemma3", "glm4-moe"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_sums_in_many_pieces_are_the_same(
    tmp_path: Path, is_shared: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part holds only one row of the widest tensor that is exchanged. Helper threads take some of the work."""
    model = ModelConfig.from_folder(make_checkpoint(family, tmp_path))
    expected, _ = run(ModelRunner(model, CACHE, ParallelConfig()))
    monkeypatch.setattr(native_cpu_decoder, "EXCHANGE_BYTES", 0)
    for size, stages, num_threads in ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)):
        tokens = generate(model, size, stages, is_shared=is_shared, kind=NativeCpuDecoder, num_threads=num_threads)
        assert tokens == expected, (size, stages, num_threads)


@pytest.mark.parametrize("family", ["llama-9-heads", "gemma3"])
def test_adapters_of_ranks_that_sum_in_many_pieces(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    model = ModelConfig.from_folder(folder)
    adapter = read_adapter("a", make_adapter(tmp_path / "adapter", folder, 0), model)
    (prompt,) = make_prompts([37])
    whole = ModelRunner(model, CACHE, ParallelConfig(), adapters=[adapter])
    plain, expected = logits(whole, prompt), logits(whole, prompt, "a")
    assert (plain - expected).abs().max() > 1
    monkeypatch.setattr(native_cpu_decoder, "EXCHANGE_BYTES", 0)
    for size, num_threads in ((2, 1), (2, 2), (4, 1)):
        ranks = ThreadedRanks(model, CACHE, ParallelConfig(tensor_parallel_size=size, num_threads=num_threads))
        ranks._on_all(lambda runner: finish(runner._decoder.load_adapter(adapter)))
        assert all(isinstance(runner._decoder, NativeCpuDecoder) for runner in ranks.runners)
        found = ranks._on_all(lambda runner: logits(runner, prompt, "a"))
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
        ranks.close()


def test_torch_ranks_serve_where_native_ones_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_folder(make_checkpoint("llama-9-heads", tmp_path))
    expected, _ = run(ModelRunner(model, CACHE, ParallelConfig()))
    monkeypatch.setattr(native_library, "_LIBRARY", None)
    for size, stages in ((2, 1), (3, 1), (2, 2)):
        assert generate(model, size, stages, is_shared=True, kind=TorchDecoder) == expected


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_bf16_and_integer_shards_are_as_exact_as_the_whole(tmp_path: Path, quantization: str) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    # The same weights in both dtypes, so that both round to the same integers.
    stored = load_file(Path(folder) / "model.safetensors")
    save_file({name: t.bfloat16().float() for name, t in stored.items()}, Path(folder) / "model.safetensors")
    (prompt,) = make_prompts([37])
    exact = ModelConfig.from_folder(folder, dtype="float32", quantization=quantization)
    expected = logits(ModelRunner(exact, CACHE, ParallelConfig()), prompt)
    model = ModelConfig.from_folder(folder, dtype="bfloat16", quantization=quantization)
    for size, stages in ((2, 1), (3, 1), (1, 2)):
        parallel = ParallelConfig(tensor_parallel_size=size, pipeline_parallel_size=stages)
        ranks = ThreadedRanks(model, CACHE, parallel)
        assert all(isinstance(runner._decoder, NativeCpuDecoder) for runner in ranks.runners)
        found = ranks._on_all(lambda runner: logits(runner, prompt))
        for rank, runner in zip(found, ranks.runners, strict=True):
            assert runner._decoder.maxima.places == rank.argmax(dim=-1).tolist()
            assert runner._decoder.maxima.largest == (rank.amax(dim=-1).tolist() if len(rank) else [])
        (sampled,) = [x for x, shard in zip(found, ranks.shards, strict=True) if shard.samples]
        assert [len(x) for x, shard in zip(found, ranks.shards, strict=True) if not shard.samples] == [0] * (
            len(found) - 1
        )
        error = float((sampled - expected).pow(2).mean().sqrt() / expected.std())
        assert error < MAX_BF16_ERROR, (size, stages)
        ranks.close()


def logits(runner: ModelRunner, token_ids: list[int], adapter: str = "") -> Tensor:
    """Logits of every token of one sequence."""
    length = len(token_ids)
    table = SequenceTable(length, CACHE.block_size)
    blocks = tuple(range(-(-length // CACHE.block_size)))
    table.add(NewSequence(0, tuple(token_ids), length, 0, blocks, SamplingParams(), 0, 0, adapter))
    return runner._decoder.compute(table.arrays((ScheduledSequence(0, 0, length, True),)), range(length)).clone()


SHAPE = DecoderShape(
    dtype=torch.float32, vocab_size=10, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1,
    num_kv_heads=1, head_size=16, rms_norm_eps=1e-5, tied_embeddings=True, sliding_window=None, max_positions=16,
    block_size=16, num_blocks=1, num_threads=1, vocab=range(5),
)  # fmt: skip
CAPACITY = 64


def make_decoder(exchange: SharedExchange | CarriedExchange) -> NativeDecoder:
    zero = {"norm.weight": 16, "layers.0.attention_norm.weight": 16, "layers.0.mlp_norm.weight": 16}
    matrices = {"lm_head": (5, 16), "layers.0.qkv_proj": (48, 16), "layers.0.o_proj": (16, 16)}
    matrices |= {"layers.0.gate_up_proj": (32, 16), "layers.0.down_proj": (16, 16)}
    weights = {name: torch.zeros(size) for name, size in zero.items()}
    weights |= {f"{name}.weight": torch.zeros(shape) for name, shape in matrices.items()}
    return NativeDecoder(SHAPE, weights.items(), torch.zeros(16, 16), exchange=exchange)


def step(held: NativeDecoder) -> Tensor:
    one = np.zeros(1, dtype=np.int64)
    tables = np.zeros((1, 1), dtype=np.int32)
    return held.forward(
        input_ids=one, positions=one, query_start_loc=[0, 1], seq_lens=[1], block_tables=tables, slot_mapping=one,
        sample_rows=[0],
    )  # fmt: skip


def test_a_rank_that_does_not_come_is_missed_and_not_waited_for_again() -> None:
    memory = memoryview(mmap.mmap(-1, shared_bytes(2, CAPACITY)))
    exchange = SharedExchange(memory, 0, 2, CAPACITY, timeout_s=0.05)
    held = make_decoder(exchange)
    for _ in range(2):
        with pytest.raises(LostRank, match="another rank did not come"):
            step(held)
    assert exchange.num_calls == 1


def test_a_rank_sleeps_until_the_other_comes() -> None:
    """The first rank has long stopped spinning when the other comes."""
    memory = memoryview(mmap.mmap(-1, shared_bytes(2, CAPACITY)))
    exchanges = [SharedExchange(memory, rank, 2, CAPACITY, timeout_s=60) for rank in range(2)]
    decoders = [make_decoder(exchange) for exchange in exchanges]
    first = threading.Thread(target=step, args=(decoders[0],))
    first.start()
    sleepers = np.frombuffer(memory, dtype=np.uint32)[16 + 1 :][:1]  # the second word of the other rank's cache line
    deadline = time.monotonic() + 60
    while not sleepers[0]:
        assert time.monotonic() < deadline
        os.sched_yield()
    assert exchanges[0].num_calls == 1
    step(decoders[1])
    first.join(60)
    assert not first.is_alive()
    assert exchanges[0].num_calls == exchanges[1].num_calls == 4  # embedding, attention, MLP, logits


def test_what_the_carrier_raises_ends_the_step() -> None:
    def gather(part: Tensor, parts: Tensor) -> None:
        raise ConnectionError("the other host is gone")

    held = make_decoder(CarriedExchange(gather, 0, 2, CAPACITY))
    with pytest.raises(ConnectionError, match="the other host is gone"):
        step(held)


def test_an_exchange_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="a row does not fit"):
        make_decoder(CarriedExchange(lambda part, parts: None, 0, 2, 15))
    with pytest.raises(ValueError, match="memory: got 64 bytes"):
        SharedExchange(memoryview(bytearray(64)), 0, 2, 15, 1.0)


class DictStore(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def test_memory_is_shared_by_those_who_can_open_it() -> None:
    store = DictStore()
    made, opened = share(store, "m", True, 100), share(store, "m", False, 100)
    assert made.memory is not None
    assert opened.memory is not None
    made.memory[7] = 3
    assert opened.memory.tolist() == [0] * 7 + [3] + [0] * 92
    path, key = store["m"].split()
    store["m"] = f"{path} {'00' * 16}"  # the memory there has another key
    assert share(store, "m", False, 100).memory is None
    store["m"] = f"{path} {key}"
    made.settle()
    assert share(store, "m", False, 100).memory is None
    store["m"] = ""  # made on a system without such memory
    assert share(store, "m", False, 100).memory is None
    assert opened.memory[7] == 3
