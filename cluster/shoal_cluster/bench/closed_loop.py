"""A batch of prompts that a fixed number of clients share, and what is measured of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from shoal_replica.errors import DeadlineExceeded, ShoalError
from shoal_replica.sampling_params import SamplingParams

BATCH_TIMEOUT_S = 300.0

Prompt = tuple[int, ...]
Stream = Callable[[Prompt], AsyncIterator[int]]
"""Runs a prompt and yields the number of tokens in each chunk as it arrives."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one arm in one turn."""

    prompts: tuple[Prompt, ...]
    concurrency: int
    num_output_tokens: int

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_output_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of a batch.

    Attributes:
        in_engine_s: mean time from a request's arrival at the engine to its first token, by the engine's clock: the
            wait for a step, and the steps. Step times differ between two processes by where their memory lies.
    """

    ttfts_s: tuple[float, ...]
    tokens_per_s: float
    in_engine_s: float = 0.0

    @property
    def ttft_p50_s(self) -> float:
        return statistics.median(self.ttfts_s)

    @property
    def hops_s(self) -> float:
        """Mean time to first token outside the engine."""
        return statistics.mean(self.ttfts_s) - self.in_engine_s


Arm = Callable[[Batch], Sample]
"""Runs a batch and measures it."""


async def run_batch(stream: Stream, batch: Batch) -> Sample:
    """Let ``batch.concurrency`` clients share the prompts; each starts its next prompt when the last has ended.

    Raises:
        DeadlineExceeded: not all are answered within BATCH_TIMEOUT_S.
        ShoalError: that of the first stream that has failed.
    """
    waiting = list(batch.prompts)
    ttfts_s: list[float] = []
    num_tokens = 0

    async def client() -> None:
        nonlocal num_tokens
        while waiting:
            asked_s, is_first = time.perf_counter(), True
            async for count in stream(waiting.pop()):
                num_tokens += count
                if is_first and count:
                    ttfts_s.append(time.perf_counter() - asked_s)
                    is_first = False

    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(BATCH_TIMEOUT_S), asyncio.TaskGroup() as clients:
            for _ in range(batch.concurrency):
                clients.create_task(client())
    except TimeoutError:
        raise DeadlineExceeded(f"{len(batch.prompts)} prompts took longer than {BATCH_TIMEOUT_S:g} s") from None
    except ExceptionGroup as group:
        if isinstance(group.exceptions[0], ShoalError):
            raise group.exceptions[0] from None
        raise
    return Sample(tuple(ttfts_s), num_tokens / (time.perf_counter() - started_s))
