"""A live cluster of two replicas and its simulation on the same arrivals: they should say the same.

shoal bench engine --threads 1 --repeats 3 --workloads s --json steps.json
python tests/benchmarks/faithful_live.py --steps steps.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

_token_folder = tempfile.TemporaryDirectory(prefix="shoal-faithful-")

from shoal_cluster.commands.local_ray import LocalRay, free_ports, make_token  # noqa: E402

os.environ.update(  # before Ray is imported
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(make_token(Path(_token_folder.name))),
    RAY_ENABLE_AUTO_CONNECT="0",
    RAY_SERVE_USE_GRPC_BY_DEFAULT="1",
    RAY_USAGE_STATS_ENABLED="0",
)

from shoal_cluster.commands.client import GatewayClient  # noqa: E402
from shoal_cluster.commands.deploy import deploy, read_config  # noqa: E402
from shoal_cluster.config import ClusterConfig  # noqa: E402
from shoal_cluster.policies.objective import LatencyObjective  # noqa: E402
from shoal_cluster.policies.pending import HoldConfig  # noqa: E402
from shoal_cluster.serve.call import GenerateCall, Usage  # noqa: E402
from shoal_cluster.sim.config import SimConfig  # noqa: E402
from shoal_cluster.sim.fit import fit_step_time  # noqa: E402
from shoal_cluster.sim.run import simulate  # noqa: E402
from shoal_cluster.sim.workload import SimRequest  # noqa: E402
from shoal_replica import SamplingParams  # noqa: E402
from shoal_replica.config import CacheConfig  # noqa: E402

TOLERANCE = 0.15
TIMEOUT_S = 300.0
NUM_GROUPS, NUM_PREFIX_TOKENS, NUM_OWN_TOKENS, NUM_OUTPUT_TOKENS = 8, 512, 32, 16
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 9000  # ordinary tokens


@dataclass(frozen=True)
class Shown:
    """What both say of a run."""

    requests_per_s: float
    ttft_mean_s: float
    hit_rate: float


@dataclass(frozen=True)
class Asked:
    """One request of the live run: whose prefix it has, and what became of it."""

    group: int
    asked_s: float
    ttft_s: float
    ended_s: float
    usage: Usage


def prompt(group: int, number: int, seed: int) -> tuple[int, ...]:
    """The group's beginning and tokens of its own."""
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


async def live(address: str, num_requests: int, rate: float, seed: int) -> list[Asked]:
    """Poisson arrivals of random groups, whatever the answers do."""
    rng = Random(seed)
    async with GatewayClient(address) as client:
        for number in range(4):  # warms up both replicas
            await ask(client, number, number, -1 - seed, 0.0)
        started_s, due_s, tasks = time.monotonic(), 0.0, []
        for number in range(num_requests):
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, rng.randrange(NUM_GROUPS), number, seed, started_s)))
        return list(await asyncio.gather(*tasks))


def shown_of(asked: list[Asked]) -> Shown:
    first_s, last_s = min(a.asked_s for a in asked), max(a.ended_s for a in asked)
    num_prompt = sum(a.usage.num_prompt_tokens for a in asked)
    return Shown(
        len(asked) / (last_s - first_s),
        statistics.mean(a.ttft_s for a in asked),
        sum(a.usage.num_cached_tokens for a in asked) / num_prompt,
    )


def simulated(asked: list[Asked], config: ClusterConfig, steps: Path) -> Shown:
    """The same arrivals and prompts, in simulated time."""
    step_time = fit_step_time(steps)
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
    report = simulate(
        SimConfig(
            num_replicas=config.scaling.min_replicas,
            cache=CacheConfig(num_blocks=replica.num_blocks, block_size=replica.block_size),
            scheduler=replica.scheduler_config(),
            step_time=step_time,
            hold=HoldConfig(objective=LatencyObjective(ttft_s=config.objective.ttft_s)),
        ),
        requests,
    )
    return Shown(report.num_finished / report.duration_s, report.ttft_s.mean, report.hit_rate)


def compare(real: Shown, model: Shown) -> bool:
    """Print both; whether they agree."""
    agree = True
    for name in ("requests_per_s", "ttft_mean_s", "hit_rate"):
        seen, made = getattr(real, name), getattr(model, name)
        off = made / seen - 1 if seen else math.inf
        agree &= abs(off) <= TOLERANCE
        print(f"{name:16} live {seen:8.3f}   simulated {made:8.3f}   {off:+.1%}")
    return agree


def configured() -> tuple[dict[str, Any], str]:
    """The local cluster's document, on ports of its own."""
    document, _ = read_config(ROOT / "deploy" / "serve" / "local.yaml")
    args = document["applications"][0]["args"]
    grpc_address, http_address = (f"127.0.0.1:{port}" for port in free_ports(2))
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address)
    return document, grpc_address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, required=True, help="JSON of `shoal bench engine --workloads s`")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0], help="requests/s, a run each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fit_step_time(options.steps)  # say what is wrong with it before anything is started
    document, address = configured()
    config = ClusterConfig.from_args(document["applications"][0]["args"])
    agree = True
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        for number, rate in enumerate(options.rates):
            asked = asyncio.run(live(address, options.requests, rate, options.seed + number))
            print(f"{options.requests} requests at {rate:g}/s")
            agree &= compare(shown_of(asked), simulated(asked, config, options.steps))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
