"""One replica's engine on four workloads, beside the floor measured in the same run.

    python tests/benchmarks/bench_engine.py --threads 1 --repeats 5 --json result.json

Every repetition uses fresh random tokens. What runs is what users run: ``LLM`` over scheduler, runner and kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from floor import Floor, measure_floor

from shoal_replica import LLM, SamplingParams
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.config import ModelConfig

BATCH, PROMPT_LEN, OUTPUT_LEN = 64, 256, 64
STREAM_PROMPT_LEN, STREAM_OUTPUT_LEN = 32, 128
FIRST_TOKEN_PROMPT_LEN = 1024
SHARERS, SHARED_LEN, OWN_LEN, SHARED_OUTPUT_LEN = 32, 768, 64, 32
NUM_BLOCKS = 2400  # of 16 tokens: (a) and (d) fit without preemption
FIRST_ORDINARY_TOKEN = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One workload. ``foreign`` is the share of one core that other processes took, the worst repetition's."""

    workload: str
    unit: str
    floor: float | None
    values: list[float]
    foreign: float

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        """Of the floor; above 1 is slower, for rates below 1 is slower."""
        return None if self.floor is None else self.median / self.floor


class Bench:
    """The workloads over one engine."""

    def __init__(self, llm: LLM, floor: Floor, repeats: int, seed: int) -> None:
        self._llm = llm
        self._model: ModelConfig = llm.config.model
        self._floor = floor
        self._repeats = repeats
        self._random = random.Random(seed)

    def throughput(self) -> Row:
        """(a) Many prompts together; output tokens per second."""
        floor = BATCH * self._floor.prefill_s(self._model, PROMPT_LEN) + sum(
            self._floor.decode_s(self._model, BATCH, PROMPT_LEN + i) for i in range(1, OUTPUT_LEN)
        )
        seconds, foreign = self._repeat(lambda: self._generate(self._prompts(BATCH, PROMPT_LEN), OUTPUT_LEN))
        tokens = BATCH * OUTPUT_LEN
        return Row("a 64 x (256 in, 64 out)", "tokens/s", tokens / floor, [tokens / s for s in seconds], foreign)

    def stream(self) -> Row:
        """(b) One sequence; milliseconds per token after the first."""
        floor = self._floor.decode_s(self._model, 1, STREAM_PROMPT_LEN + STREAM_OUTPUT_LEN // 2)

        def run() -> float:
            prompt = self._prompts(1, STREAM_PROMPT_LEN)
            first = self._generate(prompt, 1)
            return (self._generate(self._prompts(1, STREAM_PROMPT_LEN), STREAM_OUTPUT_LEN) - first) / (
                STREAM_OUTPUT_LEN - 1
            )

        seconds, foreign = self._repeat(run)
        return Row("b 1 x (32 in, 128 out)", "ms/token", floor * 1e3, [s * 1e3 for s in seconds], foreign)

    def first_token(self) -> Row:
        """(c) Milliseconds to the first token of a long prompt."""
        floor = self._floor.prefill_s(self._model, FIRST_TOKEN_PROMPT_LEN)
        seconds, foreign = self._repeat(lambda: self._generate(self._prompts(1, FIRST_TOKEN_PROMPT_LEN), 1))
        return Row("c first token of 1024", "ms", floor * 1e3, [s * 1e3 for s in seconds], foreign)

    def shared_prefix(self) -> tuple[Row, Row]:
        """(d) Prompts that begin alike: the beginning never seen, then seen in an earlier batch."""
        shared: list[int] = []

        def sharers() -> list[list[int]]:
            return [shared + own for own in self._prompts(SHARERS, OWN_LEN)]

        def cold() -> float:
            shared[:] = self._prompts(1, SHARED_LEN)[0]
            return self._generate(sharers(), SHARED_OUTPUT_LEN)

        cold_s, cold_foreign = self._repeat(cold)
        warm_s, warm_foreign = self._repeat(lambda: self._generate(sharers(), SHARED_OUTPUT_LEN))
        own = SHARERS * self._floor.prefill_s(self._model, SHARED_LEN + OWN_LEN, cached=SHARED_LEN)
        decode = sum(
            self._floor.decode_s(self._model, SHARERS, SHARED_LEN + OWN_LEN + i) for i in range(1, SHARED_OUTPUT_LEN)
        )
        first = self._floor.prefill_s(self._model, SHARED_LEN)
        return (
            Row("d 32 x (768 shared + 64, 32 out), cold", "s", first + own + decode, cold_s, cold_foreign),
            Row("d the same, warm", "s", own + decode, warm_s, warm_foreign),
        )

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        high = self._model.vocab_size - 1
        return [[self._random.randint(FIRST_ORDINARY_TOKEN, high) for _ in range(length)] for _ in range(count)]

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        self._llm.generate(prompts, params)
        return time.perf_counter() - start

    def _repeat(self, work: Callable[[], float]) -> tuple[list[float], float]:
        work()
        seconds, worst = [], 0.0
        for _ in range(self._repeats):
            before, start = _foreign_cpu_s(), time.perf_counter()
            seconds.append(work())
            worst = max(worst, (_foreign_cpu_s() - before) / (time.perf_counter() - start))
        return seconds, worst


def _foreign_cpu_s() -> float:
    """Processor seconds that every other process has used so far."""
    fields = [int(f) for f in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    user, nice, system, _idle, _wait, irq, softirq, *_ = fields
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return busy - own.ru_utime - own.ru_stime


def run_benchmark(
    model: str, num_threads: int, repeats: int, workloads: str, seed: int
) -> tuple[Floor, list[Row], float]:
    """Rows of the chosen workloads (letters of "abcd"), and the seconds that the engine took to be ready."""
    floor = measure_floor(num_threads)
    start = time.perf_counter()
    with LLM(
        model, num_threads=num_threads, num_blocks=NUM_BLOCKS, max_num_seqs=BATCH, max_num_batched_tokens=512
    ) as llm:
        ready_s = time.perf_counter() - start
        bench = Bench(llm, floor, repeats, seed)
        rows: list[Row] = []
        for letter in workloads:
            match letter:
                case "a":
                    rows.append(bench.throughput())
                case "b":
                    rows.append(bench.stream())
                case "c":
                    rows.append(bench.first_token())
                case "d":
                    rows.extend(bench.shared_prefix())
                case _:
                    raise SystemExit(f"--workloads: {letter!r} is not one of a, b, c, d")
    return floor, rows, ready_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", default="abcd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    options = parser.parse_args()
    floor, rows, ready_s = run_benchmark(
        options.model, options.threads, options.repeats, options.workloads, options.seed
    )
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.threads} thread(s): read {floor.read_bytes_s / 1e9:.1f} GB/s, bf16 {floor.gemm_flops_s / 1e9:.0f} "
        f"GFLOP/s; ready in {ready_s:.2f} s; peak {peak_mb:.0f} MB"
    )
    print(f"{'workload':40} {'unit':9} {'floor':>9} {'min':>9} {'median':>9} {'max':>9} {'ratio':>6} {'foreign':>7}")
    for row in rows:
        bound = "-" if row.floor is None else f"{row.floor:.2f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        print(
            f"{row.workload:40} {row.unit:9} {bound:>9} {min(row.values):9.2f} {row.median:9.2f} "
            f"{max(row.values):9.2f} {ratio:>6} {row.foreign:7.2f}"
        )
    if options.json:
        record = {
            "machine": platform.processor() or platform.machine(),
            "floor": asdict(floor),
            "ready_s": ready_s,
            "peak_mb": peak_mb,
            "rows": [asdict(row) | {"median": row.median, "ratio": row.ratio} for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
