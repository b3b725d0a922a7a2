"""What a rank's memory is used for, and the one-line error that says what to change when there is too little."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.model_configs import make_model

from shoal_kernels import native_library
from shoal_replica.config import CacheConfig, ParallelConfig, SchedulerConfig, default_graph_sizes
from shoal_replica.errors import ConfigError
from shoal_replica.memory_advice import host_changes, npu_changes
from shoal_replica.memory_plan import (
    GIB,
    MIB,
    MemoryPlan,
    plan_host,
    plan_memory,
    sequence_table_bytes,
    shard_weight_bytes,
)
from shoal_replica.model.sequence_table import SequenceTable
from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig
from shoal_replica.shard import make_shard, whole_shard
from shoal_replica.weight_formats import StoredQuantization

EIGHT_B = make_model(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    rope_theta=500_000.0,
    max_model_len=8192,
    tie_word_embeddings=False,
)


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "supported_kernels", lambda: ("avx2",))


def plan(
    num_blocks: int,
    free: float,
    tensor_parallel_size: int = 1,
    model: ModelConfig = EIGHT_B,
    num_host_blocks: int = 0,
) -> MemoryPlan:
    parallel = ParallelConfig(
        device="npu", tensor_parallel_size=tensor_parallel_size, graph_sizes=default_graph_sizes(64)
    )
    cache = CacheConfig(num_blocks=num_blocks, block_size=128, num_host_blocks=num_host_blocks)
    shard = make_shard(model, parallel, 0)
    return plan_memory(model, SchedulerConfig(), parallel, shard, cache, int(free * GIB))


def test_weights_are_counted_as_the_checkpoint_has_them() -> None:
    """8.03 billion parameters of two bytes each; the ranks' shares add up to little more."""
    whole = shard_weight_bytes(EIGHT_B, whole_shard(EIGHT_B))
    assert whole == EIGHT_B.weight_bytes
    parallel = ParallelConfig(tensor_parallel_size=4)
    shares = sum(shard_weight_bytes(EIGHT_B, make_shard(EIGHT_B, parallel, rank)) for rank in range(4))
    assert whole <= shares < 1.001 * whole
    stages = ParallelConfig(pipeline_parallel_size=2)
    assert sum(shard_weight_bytes(EIGHT_B, make_shard(EIGHT_B, stages, rank)) for rank in range(2)) == pytest.approx(
        whole, rel=1e-3
    )
    assert shard_weight_bytes(replace(EIGHT_B, quantization="int8"), whole_shard(EIGHT_B)) < 0.57 * whole


def test_blocks_fill_what_is_left() -> None:
    fits = plan(1, 60)
    assert fits.block == EIGHT_B.block_bytes(128) == 16 * 2**20
    room = fits.room_for_blocks
    assert 2500 < room < 2700
    plan(room, 60).check()
    with pytest.raises(ConfigError, match=f"num_blocks: got {room + 1}; npu, bfloat16: .*; num_blocks={room} fits"):
        plan(room + 1, 60).check()


def test_the_smallest_change_is_named() -> None:
    assert plan(1, 40, tensor_parallel_size=2).communication > plan(1, 40).communication == 0
    for free, change in (
        (16.48, r"graph_sizes=\[\]"),
        (16.38, "max_num_seqs=32, max_num_batched_tokens=256"),
        (15.98, "quantization=int8"),
        (8.58, "tensor_parallel_size=3"),
    ):
        field = change.partition("=")[0]
        with pytest.raises(
            ConfigError, match=rf"^{field}: npu, bfloat16: .* GiB; {change} fits, with num_blocks up to \d+$"
        ):
            check_npu(plan(100, free), free)
    with pytest.raises(ConfigError, match=r"^model: npu, bfloat16: .* GiB; the weights alone do not fit$"):
        check_npu(plan(100, 0.5), 0.5)


@pytest.mark.parametrize(
    ("free", "change"),
    [
        (15.8, "max_num_seqs=32, max_num_batched_tokens=256"),
        (15.62, "max_num_seqs=8, max_num_batched_tokens=64"),
        (14.9, "quantization=int8"),
        (7.5, "quantization=int4"),
    ],
)
def test_the_smallest_change_of_a_cpu_replica_is_named_and_fits(free: float, change: str) -> None:
    settings, cache = (EIGHT_B, SchedulerConfig(), ParallelConfig()), CacheConfig(num_blocks=900, block_size=128)
    free_bytes = int(free * GIB)
    with pytest.raises(ConfigError, match=rf"; {change} fits, with num_blocks up to \d+$") as refusal:
        plan_host(*settings, cache, free_bytes).check(host_changes(*settings, cache, free_bytes))
    named, _, num_blocks = str(refusal.value).rpartition("; ")[2].partition(" fits, with num_blocks up to ")
    fewer = dict(part.split("=") for part in named.split(", "))
    cache = replace(cache, num_blocks=int(num_blocks))
    model = replace(EIGHT_B, quantization=fewer.pop("quantization", "none"))
    scheduler = replace(SchedulerConfig(), **{name: int(value) for name, value in fewer.items()})
    plan_host(model, scheduler, ParallelConfig(), cache, free_bytes).check()


def test_adapters_take_their_part() -> None:
    settings, cache = (EIGHT_B, SchedulerConfig(), ParallelConfig()), CacheConfig(num_blocks=9, block_size=128)
    plain, adapted = (plan_host(*settings, cache, 40 * GIB, adapter_bytes=taken) for taken in (0, 2 * GIB))
    assert plain.room_for_blocks - adapted.room_for_blocks in (2 * GIB // plain.block, 2 * GIB // plain.block + 1)
    assert "adapters 2.00" in adapted.report()
    assert "adapters" not in plain.report()
    parallel = ParallelConfig(device="npu")
    shard = make_shard(EIGHT_B, parallel, 0)
    on_npu = [plan_memory(EIGHT_B, SchedulerConfig(), parallel, shard, cache, 40 * GIB, taken) for taken in (0, GIB)]
    assert on_npu[0].room_for_blocks > on_npu[1].room_for_blocks
    with pytest.raises(ConfigError, match=r"adapters 2\.00.*; quantization=int8 fits"):
        plan_host(*settings, cache, 17 * GIB, adapter_bytes=2 * GIB).check(
            host_changes(*settings, cache, 17 * GIB, adapter_bytes=2 * GIB)
        )


def test_an_mlp_beside_the_experts_counts() -> None:
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=1024, renormalize=True, layers=(0, 1))
    plain = replace(EIGHT_B, num_layers=2, moe=moe)
    shared = replace(plain, moe=replace(moe, shared_size=2048))
    more = 2 * 3 * 2048 * plain.hidden_size
    assert shared.num_parameters - plain.num_parameters == more
    for size in (1, 4):
        ranks = [make_shard(model, ParallelConfig(tensor_parallel_size=size), 0) for model in (plain, shared)]
        held = [shard_weight_bytes(model, rank) for model, rank in zip((plain, shared), ranks, strict=True)]
        assert held[1] - held[0] == more * 2 // size


def test_experts_need_memory_to_be_loaded() -> None:
    """All of a layer at once, and once more as integers, beside the weights but not beside the blocks."""
    moe = MoeConfig(num_experts=64, num_experts_per_token=2, intermediate_size=1024, renormalize=True, layers=(0, 1))
    model = replace(EIGHT_B, num_layers=2, moe=moe)
    settings, cache = (SchedulerConfig(), ParallelConfig()), CacheConfig(num_blocks=9, block_size=128)
    plain = plan_host(model, *settings, cache, 40 * GIB)
    assert plain.loading == 64 * 2 * 1024 * model.hidden_size * 2
    rounded = plan_host(replace(model, quantization="int8"), *settings, cache, 40 * GIB)
    if rounded.weights < plain.weights:  # else torch's operators widen it again
        assert 1.5 * plain.loading < rounded.loading < 1.6 * plain.loading
    plan_host(model, *settings, cache, plain.weights + plain.tables + plain.loading).check()
    with pytest.raises(ConfigError, match=r"loading does not fit, which takes 1\.00 beside weights and tables"):
        plan_host(model, *settings, cache, plain.weights + plain.tables + plain.loading - 1).check()


def test_a_table_of_tokens_is_as_large_as_planned() -> None:
    model, cache, scheduler = EIGHT_B, CacheConfig(num_blocks=9, block_size=16), SchedulerConfig(max_num_seqs=3)
    table = SequenceTable(model.max_model_len, cache.block_size, scheduler.max_num_seqs)
    assert sequence_table_bytes(model, scheduler, cache) == table._token_ids.nbytes + table._block_ids.nbytes


def test_a_long_context_takes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of angles, on each rank; of tokens, in host memory only, with as many rows as there may be sequences."""
    long = replace(EIGHT_B, max_model_len=262_144)
    angles, tokens = 262_144 * 128 * 4, 64 * (262_145 * 8 + 16_385 * 4)
    cache = CacheConfig(num_blocks=9, block_size=16)

    def planned(most: int = 64, num_ranks: int = 1) -> MemoryPlan:
        parallel = ParallelConfig(tensor_parallel_size=num_ranks)
        return plan_host(long, SchedulerConfig(max_num_seqs=most), parallel, cache, 40 * GIB)

    taken = planned()
    assert taken.tables == angles + tokens == 128 * MIB + tokens
    assert planned(most=32).tables == angles + tokens // 2
    assert planned(num_ranks=2).tables == 2 * taken.tables
    assert taken.loading == 2 * angles  # more than the largest matrix takes
    assert "tables 0.25, activations" in taken.report()
    rest = taken.weights + taken.tables + taken.activations
    assert taken.room_for_blocks == (40 * GIB - rest) // taken.block
    assert plan(9, 60, model=long).tables == angles // 2
    monkeypatch.setattr(native_library, "supported_kernels", tuple)
    assert planned().tables == angles // 2 + tokens


def check_npu(refused: MemoryPlan, free: float) -> None:
    parallel = ParallelConfig(device="npu", graph_sizes=default_graph_sizes(64))
    cache = CacheConfig(num_blocks=refused.num_blocks, block_size=128)
    refused.check(npu_changes(EIGHT_B, SchedulerConfig(), parallel, 0, cache, int(free * GIB)))


def test_the_report_says_which_weights_stay_wide() -> None:
    assert (
        "npu, bfloat16 with int8 projections (embedding, head not): weights"
        in plan(1, 60, model=replace(EIGHT_B, quantization="int8")).report()
    )
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=64, renormalize=True, layers=(0,))
    assert (
        "(embedding, head, experts not)" in plan(1, 60, model=replace(EIGHT_B, quantization="int8", moe=moe)).report()
    )


def test_host_blocks_take_staging_of_an_npu_and_all_of_themselves_of_a_cpu() -> None:
    without, room = plan(1, 60), plan(1, 60).room_for_blocks
    on_npu = plan(1, 60, num_host_blocks=1000)
    assert on_npu.room_for_blocks == room - 8
    assert (
        on_npu.report()
        == without.report().replace(" of 57", ", transfers 0.12 of 57") + "; 1000 host blocks 15.62 GiB on the host"
    )
    cache = CacheConfig(num_blocks=10, block_size=128, num_host_blocks=1000)
    on_cpu = plan_host(EIGHT_B, SchedulerConfig(), ParallelConfig(), cache, 40 * GIB)
    assert on_cpu.room_for_blocks > 10
    assert ", 1000 host blocks 15.62 of 40.00 GiB" in on_cpu.report()
    with pytest.raises(ConfigError, match=r"num_host_blocks: .*; num_host_blocks=(\d+) fits") as refusal:
        plan_host(EIGHT_B, SchedulerConfig(), ParallelConfig(), cache, 20 * GIB).check()
    fitting = replace(cache, num_host_blocks=int(str(refusal.value).split("num_host_blocks=")[1].split()[0]))
    plan_host(EIGHT_B, SchedulerConfig(), ParallelConfig(), fitting, 20 * GIB).check()
    more = replace(fitting, num_host_blocks=fitting.num_host_blocks + 1)
    too_much = plan_host(EIGHT_B, SchedulerConfig(), ParallelConfig(), more, 20 * GIB)
    with pytest.raises(ConfigError, match="num_blocks: got 10; "):
        too_much.check()


def test_ranks_of_a_host_are_part_of_the_replica() -> None:
    parallel, cache = ParallelConfig(pipeline_parallel_size=2), CacheConfig(num_blocks=10, block_size=16)
    settings = (EIGHT_B, SchedulerConfig(), parallel, cache, 9 * GIB)
    whole, parts = plan_host(*settings), [plan_host(*settings, ranks=[rank]) for rank in range(2)]
    assert whole.room_for_blocks < 0
    for part in parts:
        part.check()
    for quantity in ("weights", "tables", "activations", "communication", "block"):
        assert getattr(whole, quantity) == sum(getattr(part, quantity) for part in parts), quantity


def test_the_report_names_every_part() -> None:
    assert plan(100, 60).report().startswith("npu, bfloat16: weights 14.96, tables 0.00, activations 0.")
    for part in ("communication", "graphs", "100 KV blocks 1.56 of 57.00 GiB"):
        assert part in plan(100, 60).report()


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (5, (1, 2, 4, 5)), (64, (1, 2, 4, 8, 16, 32, 64)), (80, (1, 2, 4, 8, 16, 32, 64, 80))],
)
def test_graph_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert default_graph_sizes(most) == sizes
    ParallelConfig(device="npu", graph_sizes=sizes)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 130), (129,)])
def test_graph_sizes_that_cannot_be_filled_up(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="graph_sizes: got"):
        ParallelConfig(device="npu", graph_sizes=sizes)


def test_a_quantized_checkpoint_keeps_its_tables() -> None:
    """Embedding and head in bfloat16, and the copy of the head by which greedy tokens are found."""
    stored = StoredQuantization(method="awq", bits=4, group_size=128, has_zero_points=True)
    rounded, kept = replace(EIGHT_B, quantization="int4"), replace(EIGHT_B, quantization="int4", stored=stored)
    tables = EIGHT_B.vocab_size * EIGHT_B.hidden_size * 2
    assert kept.weight_bytes - rounded.weight_bytes == tables * 2 - tables * 17 // 16
    assert kept.weight_bytes < EIGHT_B.weight_bytes / 2
    assert rounded.has_plain_tables is False
    assert kept.has_plain_tables is EIGHT_B.has_plain_tables is True
