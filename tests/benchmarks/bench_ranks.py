"""What a step costs to send to ranks and back, without a model: ``python tests/benchmarks/bench_ranks.py``.

The ranks are real processes on the real channel; their runners return tokens at once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable

import msgspec

from shoal_replica.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from shoal_replica.executor import SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.ranks.channel import RankAddress
from shoal_replica.ranks.executor import RankExecutor
from shoal_replica.ranks.launcher import LocalRanks
from shoal_replica.ranks.runner import Rendezvous
from shoal_replica.ranks.worker import serve_rank

NUM_STEPS = 3000
RANK = (sys.executable, __file__, "--rank")


class NullRunner:
    """A model that takes no time."""

    num_collectives = 0

    def __init__(self, config: EngineConfig, rank: int, meeting: Rendezvous) -> None:
        self.samples = rank == 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        if not self.samples:
            return StepResult(())
        return StepResult(tuple(SampledToken(s.seq_id, 7) for s in output.scheduled))

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None: ...

    def close(self) -> None: ...


def main() -> None:
    model = ModelConfig(
        folder="",
        architecture="LlamaForCausalLM",
        vocab_size=32_000,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_size=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_model_len=4096,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        eos_token_ids=(),
        dtype="float32",
    )
    print("ranks  sequences  median µs  p99 µs of a step's round trip")
    for num_ranks in (2, 4, 8):
        parallel = ParallelConfig(tensor_parallel_size=num_ranks)
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


if __name__ == "__main__":
    if "--rank" in sys.argv:
        serve_rank(msgspec.json.decode(sys.stdin.readline(), type=RankAddress), NullRunner)
    else:
        main()
