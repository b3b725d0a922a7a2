"""What serving adds to an engine: a gateway with one replica beside the same engine alone, in turns on one load."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay, free_ports
from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.engine_config import engine_config
from shoal_replica.async_llm import AsyncLLM
from shoal_replica.errors import Unavailable
from shoal_replica.sampling_params import SamplingParams

NUM_RAY_CPUS = 4.0  # logical: the cluster's actors share whatever cores there are
BATCH_TIMEOUT_S = 300.0
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 9000  # ordinary tokens of any vocabulary

Prompt = tuple[int, ...]
Stream = Callable[[Prompt], AsyncIterator[int]]
"""Runs a prompt; the number of tokens in each piece as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """Clients that ask again as soon as they are answered; every prompt is new.

    Attributes:
        path: the Serve YAML whose model and replica settings both arms have.
        concurrencies: numbers of clients, one after the other.
    """

    path: Path
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    num_prompt_tokens: int = 64
    num_output_tokens: int = 32
    num_rounds: int = 5
    seed: int = 0

    def batch(self, concurrency: int, number: int) -> Batch:
        """The prompts of that round."""
        rng = Random(f"{self.seed} {concurrency} {number}")
        count = max(8, 2 * concurrency)
        prompts = [
            tuple(rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(self.num_prompt_tokens))
            for _ in range(count)
        ]
        return Batch(tuple(prompts), concurrency, self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one arm does in one round."""

    prompts: tuple[Prompt, ...]
    concurrency: int
    num_output_tokens: int

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_output_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of a batch."""

    ttft_p50_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Medians over the rounds. ``added_ttft_ms`` and ``throughput_ratio`` compare the arms within each round."""

    concurrency: int
    engine_ttft_p50_ms: float
    served_ttft_p50_ms: float
    added_ttft_ms: float
    engine_tokens_per_s: float
    served_tokens_per_s: float
    throughput_ratio: float


def measure_serving(load: ServingLoad, on_progress: Callable[[str], None]) -> Iterator[ServingCost]:
    """Start both arms, let them take turns at each batch, and compare; one after the other for ``concurrencies``.

    Raises:
        ConfigError, NotFound, Unavailable: the YAML is wrong, or an arm does not come up.
    """
    document, _ = read_config(load.path)
    args = document["applications"][0]["args"]
    args["scaling"] = {"min_replicas": 1, "max_replicas": 1}
    grpc_address, http_address = (f"127.0.0.1:{port}" for port in free_ports(2))
    args["gateway"] = {**args.get("gateway", {}), "grpc_address": grpc_address, "http_address": http_address}
    on_progress("loading the engine")
    with _engine_alone(ClusterConfig.from_args(args)) as engine:
        on_progress("starting the cluster")
        with _cluster(document, grpc_address) as served:
            for concurrency in load.concurrencies:
                yield _compare(load, concurrency, engine, served, on_progress)


Arm = Callable[[Batch], Sample]


def _compare(
    load: ServingLoad, concurrency: int, engine: Arm, served: Arm, on_progress: Callable[[str], None]
) -> ServingCost:
    pairs: list[tuple[Sample, Sample]] = []
    for number in range(load.num_rounds + 1):
        on_progress(f"{concurrency} clients, round {number} of {load.num_rounds}")
        batch = load.batch(concurrency, number)
        if number % 2:
            alone = engine(batch)
            pairs.append((alone, served(batch)))
        else:
            through = served(batch)
            pairs.append((engine(batch), through))
    return costs_of(concurrency, pairs[1:])  # the first one warms up


def costs_of(concurrency: int, pairs: Sequence[tuple[Sample, Sample]]) -> ServingCost:
    """Of (engine alone, served) samples of the same batches."""

    def median(value: Callable[[Sample, Sample], float]) -> float:
        return statistics.median(value(alone, served) for alone, served in pairs)

    return ServingCost(
        concurrency=concurrency,
        engine_ttft_p50_ms=1e3 * median(lambda alone, served: alone.ttft_p50_s),
        served_ttft_p50_ms=1e3 * median(lambda alone, served: served.ttft_p50_s),
        added_ttft_ms=1e3 * median(lambda alone, served: served.ttft_p50_s - alone.ttft_p50_s),
        engine_tokens_per_s=median(lambda alone, served: alone.tokens_per_s),
        served_tokens_per_s=median(lambda alone, served: served.tokens_per_s),
        throughput_ratio=median(lambda alone, served: served.tokens_per_s / alone.tokens_per_s),
    )


async def run_batch(stream: Stream, batch: Batch) -> Sample:
    """``batch.concurrency`` clients share the prompts; each starts the next when its last has ended."""
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
    async with asyncio.timeout(BATCH_TIMEOUT_S), asyncio.TaskGroup() as clients:
        for _ in range(batch.concurrency):
            clients.create_task(client())
    return Sample(statistics.median(ttfts_s), num_tokens / (time.perf_counter() - started_s))


@contextmanager
def _cluster(document: dict[str, Any], address: str) -> Iterator[Arm]:
    with LocalRay(NUM_RAY_CPUS) as ray:
        ray.wait_until_up()
        os.environ.update(ray.environment)
        deploy(document, ray.dashboard_url, lambda progress: None)
        with asyncio.Runner() as runner:
            client = GatewayClient(address)
            runner.run(client.__aenter__())

            async def measure(batch: Batch) -> Sample:
                async def stream(prompt: Prompt) -> AsyncIterator[int]:
                    call = GenerateCall(
                        request_id=uuid.uuid4().hex, token_ids=prompt, sampling_params=batch.sampling_params
                    )
                    async for chunk in client.generate(call):
                        yield len(chunk.token_ids)

                return await run_batch(stream, batch)

            yield lambda batch: runner.run(measure(batch))
            runner.run(client.__aexit__(None, None, None))


@contextmanager
def _engine_alone(config: ClusterConfig) -> Iterator[Arm]:
    """In a process of its own, as a replica is; its clients are in there with it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run_engine, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()

    def measure(batch: Batch) -> Sample:
        ours.send(batch)
        return _receive(ours)

    try:
        _receive(ours)
        yield measure
    finally:
        ours.close()
        process.join(BATCH_TIMEOUT_S / 10)
        process.terminate()


def _receive(connection: Connection) -> Sample:
    try:
        if not connection.poll(BATCH_TIMEOUT_S):
            raise Unavailable(f"the engine did not answer within {BATCH_TIMEOUT_S:g} s")
        sample: Sample = connection.recv()
    except EOFError:
        raise Unavailable("the engine's process has ended") from None
    return sample


def _run_engine(config: ClusterConfig, connection: Connection) -> None:
    """Answers each batch with a sample until the other end closes; the first sample only says that it is up."""

    async def main() -> None:
        llm = await AsyncLLM.start(engine_config(config))
        connection.send(Sample(0.0, 0.0))
        while True:
            try:
                batch: Batch = await asyncio.to_thread(connection.recv)
            except EOFError:
                break
            params = batch.sampling_params

            async def stream(prompt: Prompt, params: SamplingParams = params) -> AsyncIterator[int]:
                async for delta in llm.generate(prompt, params):
                    yield len(delta.token_ids)

            connection.send(await run_batch(stream, batch))
        await llm.stop()

    asyncio.run(main())
