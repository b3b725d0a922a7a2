"""Real ranks in processes, which sum in shared memory or by gloo: they give the tokens of the whole model, and nothing
is left of a group that failed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.serving_story import CACHE, run
from fixtures.waiting import DEADLINE_S
from tiny_models import make_checkpoint, make_prompts

from shoal_replica.build import build_executor, resolve_config
from shoal_replica.config import EngineConfig, ParallelConfig
from shoal_replica.errors import ConfigError, EngineDead
from shoal_replica.executor import Executor, NewSequence, ScheduledSequence, SchedulerOutput
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model_config import ModelConfig
from shoal_replica.ranks.launcher import RANK_COMMAND, LocalRanks
from shoal_replica.sampling_params import SamplingParams

LIMIT_S = 5.0


WITHOUT_SHARED_MEMORY = "import os; del os.memfd_create; from shoal_replica.ranks.worker import main; main()"
POOR = (
    "import shoal_replica.memory as memory; memory.available_bytes = lambda: 1; "
    "from shoal_replica.ranks.worker import main; main()"
)
COMMANDS = {"tp2-by-gloo": (sys.executable, "-c", WITHOUT_SHARED_MEMORY)}
GROUPS = {
    "tp2": ("llama-9-heads", 2, 1),
    "tp2-by-gloo": ("llama-9-heads", 2, 1),
    "pp2": ("llama-9-heads", 1, 2),
    "pp2-by-torch": ("llama-heads-of-24", 1, 2),
    "pp2-of-experts": ("qwen3-moe", 1, 2),
    "tp2-of-shared-experts": ("glm4-moe", 2, 1),
}


@pytest.fixture(scope="module", params=list(GROUPS))
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Executor]]:
    family, tensor_size, num_stages = GROUPS[request.param]
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
    parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    launcher = LocalRanks(parallel, COMMANDS.get(request.param, RANK_COMMAND))
    config = EngineConfig(model=ModelConfig.from_folder(folder), cache=CACHE, parallel=parallel)
    executor = build_executor(config, launcher)
    yield folder, executor
    executor.close()


def test_tokens_are_those_of_the_whole_model(group: tuple[Path, Executor]) -> None:
    folder, executor = group
    whole_model = ModelRunner(ModelConfig.from_folder(folder), CACHE, ParallelConfig())
    expected, _ = run(whole_model)
    whole_model.close()
    tokens, _ = run(executor)
    assert tokens == expected
    assert [p.num_threads() < 40 for p in psutil.Process().children()] == [True, True]


def test_ranks_of_several_hosts_look_at_their_own_memory(tmp_path: Path) -> None:
    """The free memory of the engine's host says nothing about theirs; the first rank on each host checks for all."""
    parallel = ParallelConfig(pipeline_parallel_size=2, is_one_host=False)
    config = resolve_config(
        str(make_checkpoint("llama-9-heads", tmp_path)), num_blocks=10, parallel=parallel, memory_bytes=1
    )
    with pytest.raises(ConfigError, match=r"^rank 0 \(.*\): model: cpu, float32: .* the weights alone do not fit"):
        build_executor(config, LocalRanks(parallel, (sys.executable, "-c", POOR)))
    with pytest.raises(ConfigError, match="num_blocks: must be given where the ranks are on several hosts"):
        resolve_config(config.model.folder, parallel=parallel, memory_bytes=1)


def test_a_rank_lost_inside_a_collective_takes_the_group_down(group: tuple[Path, Executor]) -> None:
    """One rank is stopped, so that the other waits for it in a collective, and is then killed. This comes after the
    test that needs the whole group."""
    _, executor = group
    ranks = psutil.Process().children()
    victim = ranks[1]
    os.kill(victim.pid, signal.SIGSTOP)
    prompt = tuple(make_prompts([20])[0])
    new = NewSequence(10**6, prompt, len(prompt), 0, (0, 1), SamplingParams(), 0)
    step = SchedulerOutput(1, (ScheduledSequence(10**6, 0, len(prompt), True),), (new,))
    failures: list[str] = []

    def execute() -> None:
        try:
            executor.execute(step)
        except EngineDead as error:
            failures.append(str(error))

    thread = threading.Thread(target=execute)
    started = time.monotonic()
    thread.start()
    os.kill(victim.pid, signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert time.monotonic() - started < LIMIT_S
    assert len(failures) == 1
    assert f"rank 1 (pid {victim.pid} on 127.0.0.1) died: signal 9" in failures[0]
    assert psutil.Process().children(recursive=True) == []
