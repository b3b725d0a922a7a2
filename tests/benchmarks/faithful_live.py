"""Compares a live cluster of two replicas with its simulation on the same arrivals: the results should agree.

python tests/benchmarks/faithful_live.py

A calibration run with other arrivals and prompts precedes each rate. Step times are fitted to the stats that the
replicas report during it. The delay of a request's way there and back is how much later first tokens of cached prompts
came in the calibration run than in its simulation. Neither uses the run that is compared.
With --steps, step times are those of a single engine instead:

shoal bench engine --threads 1 --repeats 3 --workloads s --json steps.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]


from fixtures.live_cluster import free_address  # noqa: E402

from shoal_cluster.commands.client import GatewayClient  # noqa: E402
from shoal_cluster.commands.deploy import deploy, read_config  # noqa: E402
from shoal_cluster.commands.local_ray import LocalRay  # noqa: E402
from shoal_cluster.config import ClusterConfig  # noqa: E402
from shoal_cluster.policies.hold_config import HoldConfig  # noqa: E402
from shoal_cluster.policies.objective import LatencyObjective  # noqa: E402
from shoal_cluster.serve.call import GenerateCall, Usage  # noqa: E402
from shoal_cluster.sim.cluster import SimCluster  # noqa: E402
from shoal_cluster.sim.config import SimConfig  # noqa: E402
from shoal_cluster.sim.fit import fit_live, fit_step_time  # noqa: E402
from shoal_cluster.sim.latency import StepTime  # noqa: E402
from shoal_cluster.sim.run import report, run  # noqa: E402
from shoal_cluster.sim.workload import SimRequest  # noqa: E402
from shoal_replica import SamplingParams  # noqa: E402
from shoal_replica.config import CacheConfig  # noqa: E402
from shoal_replica.stats import ReplicaStats  # noqa: E402

TOLERANCE = 0.15
TIMEOUT_S = 300.0
INTERVAL_S = 1.0
LOOK_S = 0.1  # between two polls of the replicas' stats
FEED_DELAY_S = 0.005  # used where it is not measured
CALIBRATION_SEED = 1000  # prompts and arrivals must differ from those of the runs that are compared
NUM_GROUPS, NUM_PREFIX_TOKENS, NUM_OWN_TOKENS, NUM_OUTPUT_TOKENS = 8, 512, 32, 16
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 9000  # ordinary tokens


@dataclass(frozen=True)
class Shown:
    """The figures of a run that are compared."""

    requests_per_s: float
    ttft_mean_s: float
    answer_mean_s: float
    hit_rate: float
    ttft_cold_s: float  # mean over requests with no prompt token cached; ``ttft_warm_s``: over the others
    ttft_warm_s: float


@dataclass(frozen=True)
class Asked:
    """One request of the live run: the group whose prefix it has, its times, and its usage."""

    group: int
    asked_s: float
    ttft_s: float
    ended_s: float
    usage: Usage


def prompt(group: int, number: int, seed: int) -> tuple[int, ...]:
    """The group's shared prefix, followed by tokens of its own."""
    prefix, own = Random(f"{seed} group {group}"), Random(f"{seed} request {number}")
    return (
        *(prefix.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(NUM_PREFIX_TOKENS)),
        *(own.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(NUM_OWN_TOKENS)),
    )


async def ask(client: GatewayClient, group: int, number: int, seed: int, started_s: float) -> Asked:
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    call = GenerateCall(
        request_id=f"faithful-{seed}-{number}",
        token_ids=prompt(group, number, seed),
        sampling_params=params,
        timeout_s=TIMEOUT_S,
    )
    asked_s, first_s, usage = time.monotonic(), 0.0, None
    async for chunk in client.generate(call):
        first_s = first_s or time.monotonic()
        usage = chunk.usage or usage
    assert usage is not None
    return Asked(group, asked_s - started_s, first_s - asked_s, time.monotonic() - started_s, usage)


Told = list[tuple[ReplicaStats, ReplicaStats]]
"""Pairs of stats of a replica: earlier, and a little later."""


async def look(client: GatewayClient, told: Told, ages_s: list[float]) -> None:
    """Collect the replicas' stats, and their ages at the gateway, until cancelled."""
    before: dict[str, ReplicaStats] = {}
    while True:
        for row in (await client.cluster()).replicas:
            if row.stats is not None:
                earlier = before.setdefault(row.replica_id, row.stats)
                if row.stats.time_s >= earlier.time_s + INTERVAL_S and not row.stats.num_waiting:
                    told.append((earlier, row.stats))
                    before[row.replica_id] = row.stats
                ages_s.append(row.age_s)
        await asyncio.sleep(LOOK_S)


async def watched(address: str, num_requests: int, rate: float, seed: int) -> tuple[list[Asked], Told]:
    """Do a live run; return its requests, and the stats that the replicas reported meanwhile."""
    async with GatewayClient(address) as client:
        told: Told = []
        ages_s: list[float] = []
        looking = asyncio.create_task(look(client, told, ages_s))
        asked = await live(client, num_requests, rate, seed)
        looking.cancel()
    *_, p99_s = statistics.quantiles(ages_s, n=100)
    p50_s, max_s = statistics.median(ages_s), max(ages_s)
    print(f"ledger's age in {len(ages_s)} looks: p50 {p50_s:.4f} s, p99 {p99_s:.4f} s, longest {max_s:.4f} s")
    return asked, told


def calibrate(address: str, config: ClusterConfig, num_requests: int, rate: float, seed: int) -> tuple[StepTime, float]:
    """Step times fitted to a live run, and the seconds that the way to a replica and back adds to the first token of a
    request whose prompt is cached.
    """
    asked, told = asyncio.run(watched(address, num_requests, rate, seed))
    step_time = fit_live(told)
    way_s = shown_of(asked).ttft_warm_s - simulated(asked, config, step_time, 0.0).ttft_warm_s
    return step_time, max(0.0, way_s)


async def live(client: GatewayClient, num_requests: int, rate: float, seed: int) -> list[Asked]:
    """Send Poisson arrivals from random groups, in an open loop: without waiting for answers."""
    rng = Random(seed)
    for number in range(4):  # warms up both replicas
        await ask(client, number, number, -1 - seed, 0.0)
    started_s, due_s, tasks = time.monotonic(), 0.0, []
    for number in range(num_requests):
        due_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(client, rng.randrange(NUM_GROUPS), number, seed, started_s)))
    return list(await asyncio.gather(*tasks))


async def run_live(address: str, num_requests: int, rate: float, seed: int) -> list[Asked]:
    async with GatewayClient(address) as client:
        return await live(client, num_requests, rate, seed)


def shown_of(asked: list[Asked]) -> Shown:
    first_s, last_s = min(a.asked_s for a in asked), max(a.ended_s for a in asked)
    num_prompt = sum(a.usage.num_prompt_tokens for a in asked)
    return Shown(
        len(asked) / (last_s - first_s),
        statistics.mean(a.ttft_s for a in asked),
        statistics.mean(a.ended_s - a.asked_s for a in asked),
        sum(a.usage.num_cached_tokens for a in asked) / num_prompt,
        mean(a.ttft_s for a in asked if not a.usage.num_cached_tokens),
        mean(a.ttft_s for a in asked if a.usage.num_cached_tokens),
    )


def mean(values: Iterable[float]) -> float:
    """The mean; 0 if there are no values."""
    values = list(values)
    return statistics.mean(values) if values else 0.0


def simulated(asked: list[Asked], config: ClusterConfig, step_time: StepTime, way_s: float) -> Shown:
    """Simulate the same arrivals and prompts."""
    replica = config.replica
    assert replica.num_blocks is not None
    requests = [
        SimRequest(
            request_id=f"request-{number}",
            arrival_s=a.asked_s,
            prompt_runs=((a.group, NUM_PREFIX_TOKENS), (NUM_GROUPS + number, NUM_OWN_TOKENS)),
            num_output_tokens=NUM_OUTPUT_TOKENS,
            max_tokens=NUM_OUTPUT_TOKENS,
        )
        for number, a in enumerate(asked)
    ]
    cluster = SimCluster(
        SimConfig(
            num_replicas=config.scaling.min_replicas,
            cache=CacheConfig(num_blocks=replica.num_blocks, block_size=replica.block_size),
            scheduler=replica.scheduler_config(),
            step_time=step_time,
            feed_delay_s=way_s,
            hold=HoldConfig(objective=LatencyObjective(ttft_s=config.objective.ttft_s)),
        )
    )
    said = report(run(cluster, requests))
    first = [
        (o.num_cached_tokens, (o.first_token_s or o.arrival_s) - o.arrival_s) for o in cluster.book.outcomes.values()
    ]
    return Shown(
        said.num_finished / said.duration_s,
        said.ttft_s.mean,
        statistics.mean((o.finished_s or o.arrival_s) - o.arrival_s for o in cluster.book.outcomes.values()),
        said.hit_rate,
        mean(first_s for num_cached, first_s in first if not num_cached),
        mean(first_s for num_cached, first_s in first if num_cached),
    )


def compare(real: Shown, model: Shown) -> bool:
    """Print both runs' figures; return whether they agree within TOLERANCE."""
    agree = True
    for name in ("requests_per_s", "ttft_mean_s", "answer_mean_s", "hit_rate"):
        seen, made = getattr(real, name), getattr(model, name)
        off = made / seen - 1 if seen else math.inf
        agree &= abs(off) <= TOLERANCE
        print(f"{name:16} live {seen:8.3f}   simulated {made:8.3f}   {off:+.1%}")
    print(f"first token, nothing cached: live {real.ttft_cold_s:.3f} s, simulated {model.ttft_cold_s:.3f} s", end="; ")
    print(f"most cached: {real.ttft_warm_s:.3f}, {model.ttft_warm_s:.3f} s", flush=True)
    return agree


def configured() -> tuple[dict[str, Any], str]:
    """The Serve document of the local cluster, on free ports, and its gRPC address."""
    document, _ = read_config(ROOT / "deploy" / "serve" / "local.yaml")
    args = document["applications"][0]["args"]
    grpc_address, http_address = free_address(), free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address)
    return document, grpc_address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, help="JSON of `shoal bench engine --workloads s`; else from a live run")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0], help="requests/s, a run each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    step_time, way_s = StepTime(), FEED_DELAY_S
    if options.steps is not None:
        step_time = fit_step_time(options.steps)
    document, address = configured()
    config = ClusterConfig.from_args(document["applications"][0]["args"])
    agree = True
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        for number, rate in enumerate(options.rates):
            if options.steps is None:
                seed = options.seed + CALIBRATION_SEED + number
                step_time, way_s = calibrate(address, config, options.requests, rate, seed)
                print(f"calibrated at {rate:g}/s: {step_time}; way there and back {way_s * 1000:.1f} ms")
            asked = asyncio.run(run_live(address, options.requests, rate, options.seed + number))
            print(f"{options.requests} requests at {rate:g}/s")
            agree &= compare(shown_of(asked), simulated(asked, config, step_time, way_s))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
