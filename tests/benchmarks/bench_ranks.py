"""Round-trip time of a step from the engine to its ranks, without a model: ``python tests/benchmarks/bench_ranks.py``.

The ranks are real processes on the real channel; their runners return tokens at once.

``bench_ranks.py MODEL``: the cost of a decode step of a model on one rank, and on two that sum through shared memory or
gloo: wall time, and CPU time of all ranks. The groups take turns; their best rounds count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from shoal_replica.build import resolve_config
from shoal_replica.config import CacheConfig, EngineConfig, ParallelConfig
from shoal_replica.executor import NewSequence, SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.ranks.channel import RankAddress
from shoal_replica.ranks.executor import RankExecutor
from shoal_replica.ranks.launcher import RANK_COMMAND, LocalRanks
from shoal_replica.ranks.runner import Rendezvous
from shoal_replica.ranks.worker import serve_rank
from shoal_replica.sampling_params import SamplingParams

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from fixtures.model_configs import make_model  # noqa: E402

NUM_STEPS = 3000
RANK = (sys.executable, __file__, "--rank")
WITHOUT_SHARED_MEMORY = "import os; del os.memfd_create; from shoal_replica.ranks.worker import main; main()"
GROUPS = {
    "1 rank": (1, RANK_COMMAND),
    "2 ranks, shared memory": (2, RANK_COMMAND),
    "2 ranks, gloo": (2, (sys.executable, "-c", WITHOUT_SHARED_MEMORY)),
}
NUM_ROUNDS, STEPS_OF_ROUND, PROMPT_LEN, NUM_BLOCKS = 5, 40, 32, 1024


class NullRunner:
    """A model runner that returns tokens without computing anything."""

    num_collectives = progress = 0
    awaited_rank = None

    def __init__(self, config: EngineConfig, rank: int, meeting: Rendezvous) -> None:
        self.samples = rank == 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        if not self.samples:
            return StepResult(())
        return StepResult(tuple(SampledToken(s.seq_id, 7) for s in output.scheduled))

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None: ...

    def close(self) -> None: ...


def main() -> None:
    model = make_model(num_layers=1, max_model_len=4096, dtype="float32")
    print("ranks  sequences  median µs  p99 µs of a step's round trip")
    for num_ranks in (2, 4, 8):
        parallel = ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=60)
        config = EngineConfig(model=model, cache=CacheConfig(num_blocks=4096), parallel=parallel)
        executor = RankExecutor(config, LocalRanks(parallel, RANK))
        for num_seqs in (1, 64):
            scheduled = tuple(ScheduledSequence(i, 700 + i, 1, True) for i in range(num_seqs))
            updates = tuple((i, 44, (i,)) for i in range(0, num_seqs, 16))
            times = []
            for step in range(NUM_STEPS):
                started = time.perf_counter()
                executor.execute(SchedulerOutput(step, scheduled, block_updates=updates))
                times.append((time.perf_counter() - started) * 1e6)
            quantiles = statistics.quantiles(times, n=100)
            print(f"{num_ranks:5}  {num_seqs:9}  {statistics.median(times):9.0f}  {quantiles[98]:6.0f}")
        executor.close()


class DecodingGroup:
    """A group of ranks that decode sequences, one token per sequence and step."""

    def __init__(self, model: str, num_ranks: int, command: tuple[str, ...], num_seqs: int) -> None:
        parallel = ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=60)
        config = resolve_config(model, dtype="bfloat16", num_blocks=NUM_BLOCKS, parallel=parallel)
        before = set(psutil.Process().children())
        self.executor = RankExecutor(config, LocalRanks(parallel, command))
        self._ranks = [process for process in psutil.Process().children() if process not in before]
        self._num_seqs, self._length, self._step = num_seqs, PROMPT_LEN, 0
        per_seq = NUM_BLOCKS // 16
        prompts = [tuple(100 + i + j for j in range(PROMPT_LEN)) for i in range(num_seqs)]
        params = SamplingParams(temperature=0.0)
        new = tuple(
            NewSequence(i, prompt, PROMPT_LEN, 0, tuple(range(i * per_seq, (i + 1) * per_seq)), params, 0)
            for i, prompt in enumerate(prompts)
        )
        shares = tuple(ScheduledSequence(i, 0, PROMPT_LEN, True) for i in range(num_seqs))
        self.executor.execute(SchedulerOutput(0, shares, new))

    def round(self) -> tuple[float, float]:
        """Milliseconds per step: wall time, and CPU time of all ranks."""
        started, before = time.perf_counter(), self._processor_s()
        for _ in range(STEPS_OF_ROUND):
            self._step += 1
            shares = tuple(ScheduledSequence(i, self._length, 1, True) for i in range(self._num_seqs))
            self.executor.execute(SchedulerOutput(self._step, shares))
            self._length += 1
        spent = time.perf_counter() - started, self._processor_s() - before
        return 1e3 * spent[0] / STEPS_OF_ROUND, 1e3 * spent[1] / STEPS_OF_ROUND

    def _processor_s(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._ranks))


def decode(model: str) -> None:
    print("sequences  group                   ms a step  processor ms a step")
    for num_seqs in (1, 16):
        groups = {name: DecodingGroup(model, *group, num_seqs) for name, group in GROUPS.items()}
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(NUM_ROUNDS):
            for name, group in groups.items():
                figures[name].append(group.round())
        for name, group in groups.items():
            walls, processors = zip(*figures[name], strict=True)
            print(f"{num_seqs:9}  {name:22}  {min(walls):9.1f}  {min(processors):19.1f}")
            group.executor.close()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        serve_rank(msgspec.json.decode(sys.stdin.readline(), type=RankAddress), NullRunner)
    elif len(sys.argv) > 1:
        decode(sys.argv[1])
    else:
        main()
