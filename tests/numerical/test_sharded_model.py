"""The model sharded over ranks, as threads: the same float32 tokens as the whole model, for any number of heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.rank_threads import ThreadedRanks
from fixtures.serving_story import CACHE, NUM_NEW, run
from tiny_models import FAMILIES, SHAPE, make_checkpoint
from torch import Tensor
from transformers import Qwen3Config

from shoal_replica.config import ParallelConfig
from shoal_replica.model import weights
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model.parameters import parameters
from shoal_replica.model.weights import load_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import make_shard, whole_shard

SIZES = [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3)]
# Through all sizes go heads that not every number of ranks divides, a lone KV head, windows by layer, experts, and
# experts beside shared ones. The rest of what is cut is the same in all families, which are cut once each way.
CUT_IN_ALL_SIZES = {"llama-9-heads", "gemma3-one-kv-head", "gemma3", "qwen3-moe", "glm4-moe"}


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


@pytest.fixture(scope="module")
def family(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(name, tmp_path_factory.mktemp(name))


def check_ranks(model: ModelConfig, sizes: list[tuple[int, int]]) -> None:
    """Check that the model gives the same tokens whole and sharded in each of ``sizes`` (ranks per stage, stages)."""
    whole_model = ModelRunner(model, CACHE, ParallelConfig())
    expected, scheduler = run(whole_model)
    whole_model.close()
    stats = scheduler.stats(0.0)
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_blocks_in > 0
    assert all(len(tokens) == NUM_NEW for tokens in expected.values())
    for tensor_size, num_stages in sizes:
        parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
        ranks = ThreadedRanks(model, CACHE, parallel)
        ranks.warm_up()
        tokens, _ = run(ranks)
        ranks.close()
        assert tokens == expected, (tensor_size, num_stages)


def test_tokens_are_those_of_the_whole_model(name: str, family: Path) -> None:
    model = ModelConfig.from_folder(family)
    asked = SIZES if name in CUT_IN_ALL_SIZES else [(2, 1), (1, 2)]
    check_ranks(model, [sizes for sizes in asked if sizes[0] == 1 or not model.qk_norm_spans_heads])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integer_weights_are_cut_between_their_groups(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five groups of MLP columns, for two to four ranks."""
    wide = Qwen3Config(**SHAPE | {"intermediate_size": 160}, head_dim=32)
    monkeypatch.setitem(FAMILIES, "qwen3-wide", lambda: wide)
    model = ModelConfig.from_folder(make_checkpoint("qwen3-wide", tmp_path), quantization=quantization)
    check_ranks(model, [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])


@pytest.mark.parametrize("tensor_size", [2, 3, 4])
def test_ranks_hold_every_weight_once(family: Path, tensor_size: int) -> None:
    """Matrices are split without overlap, except for KV heads that several ranks need and routers that all need."""
    config = ModelConfig.from_folder(family)
    whole_model = load_weights(config, torch.device("cpu"))
    parallel = ParallelConfig(tensor_parallel_size=tensor_size)
    shards = [make_shard(config, parallel, rank) for rank in range(tensor_size)]
    parts = [load_weights(config, torch.device("cpu"), shard) for shard in shards]
    for name, tensor in whole_model.items():
        held = [part[name] for part in parts if name in part]
        if "norm" in name or "router" in name:
            assert all(torch.equal(part, tensor) for part in held)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert len(held) == 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")) and "experts" not in name:
            assert torch.equal(torch.cat(held, dim=1), tensor)
        elif "qkv" not in name and "gate_up" not in name:
            assert torch.equal(torch.cat(held), tensor)
        elif tensor_size <= config.num_kv_heads or "gate_up" in name:
            assert sum(part.numel() for part in held) == tensor.numel()
    assert [len(s.heads) for s in shards] == [
        len(part["layers.0.o_proj.weight"][0]) // config.head_size for part in parts
    ]


class CountedSlice:
    """A slice of a file that counts what is read of it."""

    def __init__(self, stored: Any, read: dict[str, int], name: str) -> None:
        self._stored, self._read, self._name = stored, read, name
        self.get_shape = stored.get_shape

    def __getitem__(self, place: Any) -> Tensor:
        part: Tensor = self._stored[place]
        self._read[self._name] = self._read.get(self._name, 0) + part.numel()
        return part


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), (4, 1), (1, 2)])
def test_a_rank_reads_only_its_part(
    family: Path, tensor_size: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(family)
    parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    read: dict[str, int] = {}
    view = weights._view
    monkeypatch.setattr(weights, "_view", lambda piece, s: view(piece, CountedSlice(s, read, piece.name)))
    for rank in range(parallel.num_ranks):
        read.clear()
        shard = make_shard(config, parallel, rank)
        load_weights(config, torch.device("cpu"), shard)
        wanted = Counter[str]()
        for piece in [piece for parameter in parameters(config, shard) for piece in parameter.pieces]:
            wanted[piece.name] += len(piece.rows) * (len(piece.columns) if piece.columns is not None else 1)
        assert read == wanted
        assert sum(read.values()) < 0.8 * config.num_parameters


def test_stages_hold_their_layers_alone(family: Path) -> None:
    config = ModelConfig.from_folder(family)
    parallel = ParallelConfig(pipeline_parallel_size=2)
    first, last = (load_weights(config, torch.device("cpu"), make_shard(config, parallel, rank)) for rank in (0, 1))
    assert {name.split(".")[1] for name in first if name.startswith("layers.")} == {"0", "1"}
    assert {name.split(".")[1] for name in last if name.startswith("layers.")} == {"2"}
    assert "norm.weight" not in first
    assert ("embed_tokens.weight" in last) == config.tie_word_embeddings


def test_blocks_are_split_with_their_heads(family: Path) -> None:
    config = ModelConfig.from_folder(family)
    for tensor_size in (1, 2, 3, 4):
        parallel = ParallelConfig(tensor_parallel_size=tensor_size)
        total = sum(make_shard(config, parallel, rank).block_bytes(config, 16) for rank in range(tensor_size))
        copies = max(config.num_kv_heads, tensor_size) / config.num_kv_heads
        assert total == copies * config.block_bytes(16)
    assert whole_shard(replace(config)).block_bytes(config, 16) == config.block_bytes(16)
