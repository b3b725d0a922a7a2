"""What cached blocks that go from replica to replica are worth, on a live cluster of two, with transfers and without:
when the first token comes of a prompt that the other replica has computed, and how long a replica with long answers
takes to drain.

python tests/benchmarks/transfer_live.py --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]


from fixtures.live_cluster import free_address, num_connected, until_cluster  # noqa: E402

from shoal_cluster.commands.client import GatewayClient  # noqa: E402
from shoal_cluster.commands.deploy import deploy, read_config  # noqa: E402
from shoal_cluster.commands.local_ray import LocalRay  # noqa: E402
from shoal_cluster.serve.call import GenerateCall  # noqa: E402
from shoal_cluster.serve.rows import ClusterRow  # noqa: E402
from shoal_replica import SamplingParams  # noqa: E402

ADMIN_KEY = "transfer"
LENGTHS = (128, 256, 512, 1024, 1536)
NUM_ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 400, 1600
BEGUN_TOKENS = 50  # of each answer, before the drain begins
PAUSE_S = 0.3
TIMEOUT_S = 300.0


def prompt_of(num_tokens: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(num_tokens))


async def stream(client: GatewayClient, prompt: tuple[int, ...], num_tokens: int, seed: int = 0) -> list[float]:
    """When each part of an answer came. It is drawn, so that few guesses at it are right."""
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    call = GenerateCall(request_id=uuid.uuid4().hex, token_ids=prompt, sampling_params=params, timeout_s=TIMEOUT_S)
    return [time.perf_counter() async for _ in client.generate(call)]


async def first_tokens(client: GatewayClient, rng: Random) -> None:
    """A prompt goes to one replica, to the other, and to the first again."""
    for num_tokens in LENGTHS:
        prompt, times = prompt_of(num_tokens, rng), list[float]()
        for _ in range(3):
            began = time.perf_counter()
            times.append((await stream(client, prompt, 1))[0] - began)
            await asyncio.sleep(PAUSE_S)
        print(f"{num_tokens} tokens: computed, at the other replica, cached (ms):", *(f"{1e3 * t:.0f}" for t in times))


async def drain(client: GatewayClient, http_address: str, rng: Random) -> None:
    """Drain the busier of the replicas while both have long answers to give."""
    before = num_generated(await client.cluster())
    calls = [
        asyncio.create_task(stream(client, prompt_of(PROMPT_TOKENS, rng), ANSWER_TOKENS, seed=number))
        for number in range(NUM_ANSWERS)
    ]

    def is_under_way(row: ClusterRow) -> bool:
        all_run = sum(map(num_running, row.replicas)) == NUM_ANSWERS
        return all_run and num_generated(row) - before >= NUM_ANSWERS * BEGUN_TOKENS

    row = await until_cluster(client, is_under_way)
    name, began = max(row.replicas, key=num_running).replica_id, time.perf_counter()
    async with httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = await http.post(f"http://{http_address}/dashboard/controls/drain/{name}", headers=headers)
        answer.raise_for_status()

    def is_drained(row: ClusterRow) -> bool:
        return all(num_running(replica) == 0 for replica in row.replicas if replica.replica_id == name)

    await until_cluster(client, is_drained)
    drained_s = time.perf_counter() - began
    times = await asyncio.gather(*calls)
    gaps = [after - before for of in times for before, after in pairwise(of) if after > began]
    print(f"drained in {drained_s:.2f} s; the longest pause of an answer since then {1e3 * max(gaps):.0f} ms")
    await until_cluster(client, lambda row: num_connected(row) == 2)


def num_generated(row: ClusterRow) -> int:
    return sum(replica.stats.num_generated_tokens for replica in row.replicas if replica.stats)


def num_running(replica: Any) -> int:
    return 0 if replica.stats is None else replica.stats.num_running


async def measure(addresses: tuple[str, str], num_rounds: int) -> None:
    async with GatewayClient(addresses[0]) as client:
        await until_cluster(client, lambda row: num_connected(row) == 2)
        for number in range(num_rounds):
            await first_tokens(client, Random(number))
        for number in range(num_rounds):
            await drain(client, addresses[1], Random(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for transfers in (True, False):
        document, _ = read_config(ROOT / "deploy" / "serve" / "local.yaml")
        application = document["applications"][0]
        addresses = free_address(), free_address()
        args = application["args"]
        args["gateway"].update(grpc_address=addresses[0], http_address=addresses[1], admin_key=ADMIN_KEY)
        args["replica"].update(kv_transfer=transfers)
        rule = {"routing": {"rule": "round_robin"}}
        application["deployments"] = [{"name": "Gateway", "user_config": rule}]
        with LocalRay(num_cpus=4) as ray:
            ray.wait_until_up()
            deploy(document, ray.dashboard_url, lambda progress: None)
            print("with transfers" if transfers else "without", flush=True)
            asyncio.run(measure(addresses, options.rounds))


if __name__ == "__main__":
    main()
