"""What serving adds to an engine: a gateway with one replica and the bare engine take turns on the same load."""

from __future__ import annotations

import asyncio
import os
import statistics
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from shoal_cluster.bench.closed_loop import BATCH_TIMEOUT_S, Arm, Batch, Prompt, Sample, run_batch
from shoal_cluster.bench.engine_arm import engine_alone
from shoal_cluster.bench.lone_replica import make_lone_replica
from shoal_cluster.bench.wire_client import WireClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay, free_ports
from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.codec import call_to_proto, chunk_from_bytes
from shoal_cluster.serve.engine_config import engine_config
from shoal_replica.errors import InvalidArgument, Unavailable

MIN_REQUESTS = 96  # per arm and number of clients
NUM_RAY_CPUS = 4.0  # logical: the cluster's actors share the cores that there are
TIMES_IN_ENGINE = ("shoal_replica_queue_seconds_sum", "shoal_replica_prefill_seconds_sum")
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 9000  # ordinary tokens of any vocabulary

GENERATE = "/shoal.v1.Generation/Generate"

Spread = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """A closed loop: each client sends its next request as soon as the last one is answered. Every prompt is new.

    Attributes:
        path: the Serve YAML whose model and replica settings both arms use.
        concurrencies: numbers of clients to measure with, one after the other.
        num_rounds: least number of turns per arm; with few clients there are more.
    """

    path: Path
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    num_prompt_tokens: int = 64
    num_output_tokens: int = 32
    num_rounds: int = 5
    seed: int = 0

    def check_fits(self, max_model_len: int) -> None:
        """Raises InvalidArgument for prompts and answers that are longer together than ``max_model_len``."""
        if self.num_prompt_tokens + self.num_output_tokens > max_model_len:
            limit = f"with output_tokens ({self.num_output_tokens}) it must be at most {max_model_len}"
            raise InvalidArgument("prompt_tokens", self.num_prompt_tokens, limit)

    def num_turns(self, concurrency: int) -> int:
        """How many turns each arm has."""
        return max(self.num_rounds, -(-MIN_REQUESTS // _batch_size(concurrency)))

    def batch(self, concurrency: int, number: int) -> Batch:
        """The prompts of turn ``number``."""
        rng, prompts = Random(f"{self.seed} {concurrency} {number}"), dict[Prompt, None]()
        while len(prompts) < _batch_size(concurrency):  # short ones may come twice
            prompts[tuple(rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(self.num_prompt_tokens))] = None
        return Batch(tuple(prompts), concurrency, self.num_output_tokens)


def _batch_size(concurrency: int) -> int:
    return max(4, 2 * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Medians over the turns. ``added_ttft_ms``, ``added_hops_ms`` and ``throughput_ratio`` compare the arms within
    each turn; ``hops`` is the part of the time to first token that is spent outside the engine.
    """

    concurrency: int
    engine_ttft_p50_ms: float
    served_ttft_p50_ms: float
    added_ttft_ms: Spread
    engine_hops_ms: float
    served_hops_ms: float
    added_hops_ms: Spread
    engine_tokens_per_s: float
    served_tokens_per_s: float
    throughput_ratio: float


def measure_serving(load: ServingLoad, on_progress: Callable[[str], None]) -> Iterator[ServingCost]:
    """Start both arms, let them take turns on each batch, and compare, for each of ``concurrencies``.

    Raises:
        ConfigError, NotFound, Unavailable: the YAML is wrong, or an arm does not come up.
        InvalidArgument: prompt and answer do not fit the model's context.
        ShoalError: a request failed.
    """
    document, _ = read_config(load.path)
    grpc_address, http_address = (f"127.0.0.1:{port}" for port in free_ports(2))
    args = make_lone_replica(document, grpc_address, http_address, os.environ)
    config = engine_config(ClusterConfig.from_args(args))
    load.check_fits(config.model.max_model_len)
    on_progress("loading the engine")
    with engine_alone(config) as engine:
        on_progress("starting the cluster")
        with _cluster(document, grpc_address, f"http://{http_address}/metrics") as served:
            for concurrency in load.concurrencies:
                yield _compare(load, concurrency, engine, served, on_progress)


def _compare(
    load: ServingLoad, concurrency: int, engine: Arm, served: Arm, on_progress: Callable[[str], None]
) -> ServingCost:
    pairs: list[tuple[Sample, Sample]] = []
    num_turns = load.num_turns(concurrency)
    for number in range(num_turns + 1):
        on_progress(f"{concurrency} clients, turn {number} of {num_turns}")
        batch = load.batch(concurrency, number)
        if number % 2:
            alone = engine(batch)
            pairs.append((alone, served(batch)))
        else:
            through = served(batch)
            pairs.append((engine(batch), through))
    return costs_of(concurrency, pairs[1:])  # the first pair is the warm-up


def costs_of(concurrency: int, pairs: Sequence[tuple[Sample, Sample]]) -> ServingCost:
    """The costs, from (engine alone, served) samples of the same batches."""

    def median(value: Callable[[Sample, Sample], float]) -> float:
        return statistics.median(value(alone, served) for alone, served in pairs)

    def added_ms(value: Callable[[Sample], float]) -> Spread:
        added = sorted(1e3 * (value(served) - value(alone)) for alone, served in pairs)
        return added[len(added) // 4], statistics.median(added), added[3 * len(added) // 4]

    return ServingCost(
        concurrency=concurrency,
        engine_ttft_p50_ms=1e3 * median(lambda alone, served: alone.ttft_p50_s),
        served_ttft_p50_ms=1e3 * median(lambda alone, served: served.ttft_p50_s),
        added_ttft_ms=added_ms(lambda sample: sample.ttft_p50_s),
        engine_hops_ms=1e3 * median(lambda alone, served: alone.hops_s),
        served_hops_ms=1e3 * median(lambda alone, served: served.hops_s),
        added_hops_ms=added_ms(lambda sample: sample.hops_s),
        engine_tokens_per_s=median(lambda alone, served: alone.tokens_per_s),
        served_tokens_per_s=median(lambda alone, served: served.tokens_per_s),
        throughput_ratio=median(lambda alone, served: served.tokens_per_s / alone.tokens_per_s),
    )


@contextmanager
def _cluster(document: dict[str, Any], address: str, metrics_url: str) -> Iterator[Arm]:
    with LocalRay(NUM_RAY_CPUS) as ray:
        ray.wait_until_up()
        os.environ.update(ray.environment)
        deploy(document, ray.dashboard_url, lambda progress: None)
        with asyncio.Runner() as runner:
            host, _, port = address.rpartition(":")
            clients: list[WireClient] = []  # connections without a call

            async def measure(batch: Batch) -> Sample:
                while len(clients) < batch.concurrency:
                    clients.append(await WireClient.connect(host, int(port), GENERATE))
                bodies = {prompt: _body(prompt, batch) for prompt in batch.prompts}

                async def stream(prompt: Prompt) -> AsyncIterator[int]:
                    client, num_tokens = clients.pop(), 0
                    async for message in client.call(bodies[prompt]):
                        count = len(chunk_from_bytes(message).token_ids)
                        num_tokens += count
                        yield count
                    if num_tokens < batch.num_output_tokens:
                        raise Unavailable(f"a stream ended after {num_tokens} of {batch.num_output_tokens} tokens")
                    clients.append(client)

                return await run_batch(stream, batch)

            def turn(batch: Batch) -> Sample:
                before_s = _time_in_engine(metrics_url)
                sample = runner.run(measure(batch))
                return replace(sample, in_engine_s=(_time_in_engine(metrics_url) - before_s) / len(batch.prompts))

            yield turn
            for client in clients:
                client.close()


def _body(prompt: Prompt, batch: Batch) -> bytes:
    call = GenerateCall(request_id=uuid.uuid4().hex, token_ids=prompt, sampling_params=batch.sampling_params)
    return call_to_proto(call).SerializeToString()


def _time_in_engine(metrics_url: str) -> float:
    """Seconds from arrival at the engine to first token, summed over all requests so far."""
    with urlopen(metrics_url, timeout=BATCH_TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name in TIMES_IN_ENGINE)
