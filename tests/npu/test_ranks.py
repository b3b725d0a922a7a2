"""Two ranks in two processes, each with an NPU of its own, joined by torch_npu's HCCL process group."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from npu_models import GREEDY, NUM_SHARED, Expected, make_folder, make_prompts

from shoal_replica import LLM
from shoal_replica.build import build_executor, resolve_config
from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError, EngineDead
from shoal_replica.ranks.launcher import LocalRanks

DOWN_LIMIT_S = 5.0


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"tensor_parallel_size": 2, "num_blocks": 6, "num_host_blocks": 8}),
        ("qwen3-moe", {"tensor_parallel_size": 2}),
        ("glm4-moe", {"tensor_parallel_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 2}),
    ],
    ids=["tensor", "experts", "shared-experts", "pipeline"],
)
def test_two_ranks_generate_the_cpus_tokens(
    family: str, sizes: dict[str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(family, tmp_path)
    prompts = make_prompts()
    expected = Expected.of(folder, prompts)
    settings = {"num_blocks": 32, "max_num_seqs": 8, "graph_sizes": [8]} | sizes
    with LLM(str(folder), device="npu", **settings) as llm:
        ranks = psutil.Process().children()
        assert len(ranks) == 2
        seen = {rank.environ()["ASCEND_RT_VISIBLE_DEVICES"] for rank in ranks}
        assert seen == {"0", "1"}
        expected.check(llm.generate(prompts, GREEDY))
        again = llm.generate(prompts, GREEDY)
        expected.check(again)
        # Blocks that come back from host memory are only reused whole.
        assert again[-1].num_cached_tokens == (128 if "num_host_blocks" in sizes else NUM_SHARED)
        assert (llm.stats().num_blocks_in > 0) == ("num_host_blocks" in sizes)
    # What a rank logs is seen here: collectives inside graphs were captured, too.
    assert "no graph" not in capfd.readouterr().err
    assert not [rank for rank in ranks if rank.is_running()]


def test_a_rank_that_dies_takes_its_group_down(tmp_path: Path) -> None:
    with LLM(
        str(make_folder("llama", tmp_path)), device="npu", num_blocks=32, max_num_seqs=8, tensor_parallel_size=2
    ) as llm:
        ranks = psutil.Process().children()
        victim = next(rank for rank in ranks if rank.environ()["ASCEND_RT_VISIBLE_DEVICES"] == "1")
        llm.generate(make_prompts()[:1], GREEDY)
        victim.kill()
        started = time.monotonic()
        with pytest.raises(EngineDead, match=rf"rank 1 \(pid {victim.pid} .* died: signal 9"):
            llm.generate(make_prompts(), GREEDY)
        assert time.monotonic() - started < DOWN_LIMIT_S
    assert not [rank for rank in ranks if rank.is_running()]


FAILING_DEVICE = """
import torch_npu
def synchronize(stream):
    raise RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507057")
torch_npu.npu.Stream.synchronize = synchronize
from shoal_replica.ranks.worker import main
main()
"""


def test_a_device_that_fails_is_its_own_ranks_though_another_samples(tmp_path: Path) -> None:
    """Both ranks find out when they wait for their device; rank 0 waits for the tokens, which come all the same."""
    parallel = ParallelConfig(device="npu", tensor_parallel_size=2, graph_sizes=())
    config = resolve_config(str(make_folder("llama", tmp_path)), num_blocks=32, parallel=parallel)
    with pytest.raises(EngineDead, match=r"^rank 1 \(.*\) failed: RuntimeError: NPU function error: .* 507057"):
        build_executor(config, LocalRanks(parallel, (sys.executable, "-c", FAILING_DEVICE)))


def test_the_pool_of_several_ranks_is_sized_before_they_start(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    with pytest.raises(ConfigError, match="num_blocks: must be given, or device_memory_gib"):
        LLM(str(folder), device="npu", tensor_parallel_size=2)
