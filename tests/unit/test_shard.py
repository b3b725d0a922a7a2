"""How a model is split among ranks: each part once, evenly, and every head on the rank of the KV head it reads."""

from __future__ import annotations

from itertools import chain

import pytest
from fixtures.model_configs import make_model

from shoal_replica.config import CacheConfig, EngineConfig, ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig
from shoal_replica.shard import Shard, make_shard


def model(num_heads: int = 8, num_kv_heads: int = 8, inner: int = 1536, vocab_size: int = 1000) -> ModelConfig:
    return make_model(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=inner,
        num_layers=7,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        tie_word_embeddings=False,
        qk_norm=True,
        moe=MoeConfig(num_experts=6, num_experts_per_token=2, intermediate_size=64, renormalize=True, layers=(0,)),
    )


def shards(config: ModelConfig, tensor_size: int, num_stages: int = 1) -> list[Shard]:
    parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    return [make_shard(config, parallel, rank) for rank in range(parallel.num_ranks)]


@pytest.mark.parametrize("tensor_size", range(1, 10))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (9, 9), (9, 1), (32, 8), (12, 2), (10, 5)])
def test_heads_are_dealt_once_and_read_their_own_kv_head(num_heads: int, num_kv_heads: int, tensor_size: int) -> None:
    group = num_heads // num_kv_heads
    dealt = shards(model(num_heads, num_kv_heads), tensor_size)
    assert list(chain(*(shard.heads for shard in dealt))) == list(range(num_heads))
    for shard in dealt:
        assert shard.heads
        local_group, rest = divmod(len(shard.heads), len(shard.kv_heads))
        assert rest == 0
        for place, head in enumerate(shard.heads):  # as the attention kernel reads them
            assert shard.kv_heads[place // local_group] == head // group


@pytest.mark.parametrize("tensor_size", range(1, 9))
def test_the_rest_is_dealt_once(tensor_size: int) -> None:
    dealt = shards(model(), tensor_size)
    for name, total in (("mlp", 1536), ("experts", 6), ("vocab", 1000)):
        assert list(chain(*(getattr(shard, name) for shard in dealt))) == list(range(total)), name
    assert all(len(shard.vocab) <= shard.vocab_share for shard in dealt)
    assert max(len(s.mlp) for s in dealt) <= 1.25 * 1536 / tensor_size
    assert [shard.samples for shard in dealt] == [True] + [False] * (tensor_size - 1)


def test_shares_keep_whole_vector_units_where_they_can() -> None:
    assert [len(s.mlp) for s in shards(model(inner=1536), 3)] == [512] * 3
    assert [len(s.mlp) for s in shards(model(inner=96), 4)] == [24] * 4
    assert [len(s.mlp) for s in shards(model(inner=7), 2)] == [4, 3]
    assert all(len(s.mlp) % 128 == 0 for s in shards(model(inner=128 * 41), 5)[:-1])


def test_stages_follow_each_other() -> None:
    dealt = shards(model(), 2, 3)
    assert [list(shard.layers) for shard in dealt] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]
    assert [shard.stage for shard in dealt] == [0, 0, 1, 1, 2, 2]
    assert [shard.tensor_rank for shard in dealt] == [0, 1] * 3
    assert [shard.samples for shard in dealt] == [False] * 4 + [True, False]
    assert [shard.is_first_stage for shard in dealt] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (
            {"tensor_parallel_size": 9},
            "tensor_parallel_size: got 9; must be at most 8, the model's number of attention",
        ),
        (
            {"pipeline_parallel_size": 8},
            "pipeline_parallel_size: got 8; must be at most 7, the model's number of layers",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: got 0; must be an integer of at least 1"),
    ],
)
def test_more_ranks_than_parts_are_refused(parallel: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model=model(), cache=CacheConfig(num_blocks=100), parallel=ParallelConfig(**parallel))
    assert str(caught.value).startswith(words)
