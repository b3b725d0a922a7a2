"""Which kernels serve on a CPU, and that memory is planned for the ones chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.model_configs import make_model

from shoal_kernels import native_library
from shoal_replica.config import CacheConfig, ParallelConfig, SchedulerConfig
from shoal_replica.errors import ConfigError
from shoal_replica.memory_advice import host_changes
from shoal_replica.memory_plan import MemoryPlan, plan_host
from shoal_replica.model.cpu_kernels import choose_kernels
from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig

MODEL = make_model(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_size=64,
)
MOE = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=64, renormalize=True, layers=(0,))
CACHE = CacheConfig(num_blocks=16)
SOLE = ParallelConfig()


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "supported_kernels", lambda: ("avx2", "portable"))


@pytest.fixture
def not_built(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "supported_kernels", lambda: ())


def plan(model: ModelConfig, cache: CacheConfig = CACHE, parallel: ParallelConfig = SOLE) -> MemoryPlan:
    return plan_host(model, SchedulerConfig(), parallel, cache, 1 << 30)


def test_native_where_it_takes_all_ranks() -> None:
    kernels = choose_kernels(MODEL, CACHE, SOLE)
    assert kernels.is_native
    assert str(kernels) == "avx2"
    assert choose_kernels(replace(MODEL, dtype="float32"), CACHE, SOLE).is_native
    assert choose_kernels(replace(MODEL, moe=MOE), CACHE, SOLE).is_native
    assert choose_kernels(replace(MODEL, quantization="int4"), CACHE, ParallelConfig(tensor_parallel_size=3)).is_native


@pytest.mark.parametrize(
    ("model", "cache", "why"),
    [
        (replace(MODEL, moe=replace(MOE, intermediate_size=63)), CACHE, "the experts' intermediate size 63 is odd"),
        (
            replace(MODEL, dtype="float32", quantization="int4"),
            CACHE,
            "int4 weights are for dtype bfloat16, not float32",
        ),
        (replace(MODEL, head_size=72), CACHE, "a head size of 72 is not a multiple of 16 up to 256"),
        (replace(MODEL, hidden_size=1023), CACHE, "the hidden size 1023 is odd"),
        (replace(MODEL, num_heads=97, num_kv_heads=1), CACHE, "97 query heads for a KV head are more than 96"),
        (MODEL, replace(CACHE, block_size=24), "block_size 24 is not a multiple of 16"),
    ],
)
def test_torch_serves_the_rest_and_the_reason_is_told(model: ModelConfig, cache: CacheConfig, why: str) -> None:
    kernels = choose_kernels(model, cache, SOLE)
    assert not kernels.is_native
    assert why in str(kernels)
    assert plan(model, cache).report().endswith(f"; kernels {kernels}")


def test_torch_serves_all_where_nothing_was_built(not_built: None) -> None:
    assert str(choose_kernels(MODEL, CACHE, SOLE)) == "torch (the native kernels were not built)"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("parallel", [SOLE, ParallelConfig(tensor_parallel_size=2)])
def test_integers_save_memory_where_the_native_decoder_holds_them(parallel: ParallelConfig, quantization: str) -> None:
    for dtype in ("bfloat16", "float32"):
        wide = replace(MODEL, dtype=dtype)
        rounded = plan(replace(wide, quantization=quantization), parallel=parallel)
        if dtype == "bfloat16":
            assert rounded.weights < 0.6 * plan(wide, parallel=parallel).weights
            assert f"bfloat16 with {quantization} weights: " in rounded.report()
        else:
            assert rounded.weights == plan(wide, parallel=parallel).weights
            assert f"float32 with {quantization} weights widened: " in rounded.report()
    odd = replace(CACHE, block_size=8)
    assert plan(replace(MODEL, quantization=quantization), odd, parallel).weights == plan(MODEL, odd, parallel).weights


def test_integers_are_no_advice_where_torch_would_widen_them(not_built: None) -> None:
    settings = (MODEL, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1), SOLE)
    free = int(0.9 * plan(MODEL).weights)
    with pytest.raises(ConfigError, match=r"^model: .*the weights alone do not fit$"):
        plan_host(*settings, CACHE, free).check(host_changes(*settings, CACHE, free))
