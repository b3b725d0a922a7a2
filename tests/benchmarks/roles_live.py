"""What it is worth that one replica computes prompts and the other generates, on a live cluster of two: the time
between tokens of answers while long prompts keep coming, and how long those take, with the roles and without, in turn.

python tests/benchmarks/roles_live.py --rounds 3 --every 0.9
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from fixtures.live_cluster import free_address, until_cluster  # noqa: E402

from shoal_cluster.commands.client import GatewayClient  # noqa: E402
from shoal_cluster.commands.deploy import deploy, read_config  # noqa: E402
from shoal_cluster.commands.local_ray import LocalRay  # noqa: E402
from shoal_cluster.serve.call import GenerateCall  # noqa: E402
from shoal_replica import SamplingParams  # noqa: E402

NUM_ANSWERS, ANSWER_PROMPT, ANSWER_TOKENS = 6, 64, 400
NUM_PROMPTS, PROMPT_TOKENS = 10, 1000
TIMEOUT_S = 300.0


def prompt_of(num_tokens: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(num_tokens))


async def stream(client: GatewayClient, prompt: tuple[int, ...], num_tokens: int) -> list[float]:
    """When it was asked for, and when each part of its answer came. It is drawn, so that few guesses are right."""
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True)
    call = GenerateCall(request_id=uuid.uuid4().hex, token_ids=prompt, sampling_params=params, timeout_s=TIMEOUT_S)
    return [time.perf_counter(), *[time.perf_counter() async for _ in client.generate(call)]]


async def measure(client: GatewayClient, every_s: float, rng: Random) -> str:
    """Long answers, and beside them long prompts at a steady rate."""
    began = time.perf_counter()
    answers = [
        asyncio.create_task(stream(client, prompt_of(ANSWER_PROMPT, rng), ANSWER_TOKENS)) for _ in range(NUM_ANSWERS)
    ]
    await asyncio.sleep(every_s)
    prompts = []
    for _ in range(NUM_PROMPTS):
        prompts.append(asyncio.create_task(stream(client, prompt_of(PROMPT_TOKENS, rng), 16)))
        await asyncio.sleep(every_s)
    lasted = await asyncio.gather(*answers)
    asked = await asyncio.gather(*prompts)
    firsts, seconds = (sorted(times[i + 1] - times[i] for times in asked) for i in (0, 1))
    gaps = sorted(after - before for times in lasted for before, after in pairwise(times[1:]))
    middle, shares = len(asked) // 2, (0.5, 0.9, 0.99, 1.0)
    told = "/".join(f"{1e3 * gaps[round(share * (len(gaps) - 1))]:.0f}" for share in shares)
    return (
        f"between tokens p50/p90/p99/most {told} ms; of a prompt first token p50 {firsts[middle]:.2f} s, most "
        f"{firsts[-1]:.2f} s, second {1e3 * seconds[middle]:.0f} ms later, most {1e3 * seconds[-1]:.0f} ms; "
        f"answers took {max(times[-1] for times in lasted) - began:.1f} s"
    )


async def in_turn(application: dict[str, Any], document: dict[str, Any], address: str, url: str, options: Any) -> None:
    async with GatewayClient(address) as client:
        for number in range(2 * options.rounds):
            share = 0.5 * (number % 2)
            application["deployments"] = [{"name": "Gateway", "user_config": {"routing": {"prefill_share": share}}}]
            await asyncio.to_thread(deploy, document, url, lambda progress: None)
            roles = {"prefill", "decode"} if share else {""}
            await until_cluster(client, lambda row, roles=roles: {r.role for r in row.replicas} == roles)  # type: ignore[misc]
            if not number:
                await measure(client, options.every, Random("first"))  # every replica's pace is measured then
            print(f"prefill_share {share:g}: {await measure(client, options.every, Random(number))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=0.9, help="seconds from one prompt to the next")
    options = parser.parse_args()
    document, _ = read_config(ROOT / "deploy" / "serve" / "local.yaml")
    application, address = document["applications"][0], free_address()
    application["args"]["gateway"].update(grpc_address=address, http_address=free_address())
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        asyncio.run(in_turn(application, document, address, ray.dashboard_url, options))


if __name__ == "__main__":
    main()
