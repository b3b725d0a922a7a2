"""Scales a live cluster down under load: every stream must end complete, with the tokens it would have had anyway.

python tests/benchmarks/drain_live.py --downs 50
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]


from fixtures.live_cluster import LOOK_S, free_address, num_connected, until_cluster  # noqa: E402

from shoal_cluster.commands.client import GatewayClient  # noqa: E402
from shoal_cluster.commands.deploy import deploy, read_config  # noqa: E402
from shoal_cluster.commands.local_ray import LocalRay  # noqa: E402
from shoal_cluster.serve.call import GenerateCall  # noqa: E402
from shoal_cluster.serve.rows import ClusterRow  # noqa: E402
from shoal_replica import SamplingParams  # noqa: E402
from shoal_replica.errors import ShoalError  # noqa: E402

ADMIN_KEY = "drain"
PROMPTS = (
    "Once upon a time",
    "The sea is",
    "Why do cats",
    "A short list of fruits:",
    "In 1912",
    "My favourite number is",
)
TIMEOUT_S = 120.0


async def stream(client: GatewayClient, prompt: str, num_tokens: int) -> tuple[int, ...]:
    """The tokens of a whole answer. Raises ShoalError if the call fails."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    call = GenerateCall(request_id=uuid.uuid4().hex, text=prompt, sampling_params=params, timeout_s=TIMEOUT_S)
    token_ids: list[int] = []
    async for chunk in client.generate(call):
        token_ids += chunk.token_ids
    return tuple(token_ids)


async def measure(address: str, num_downs: int, width: int, num_tokens: int) -> Counter[str]:
    """Keep ``width`` streams open while the cluster scales to three replicas and back to one, until ``num_downs``
    replicas have been removed.
    """
    seen: Counter[str] = Counter()
    async with GatewayClient(address) as client:
        expected = {prompt: await stream(client, prompt, num_tokens) for prompt in PROMPTS}
        done = asyncio.Event()

        async def keep(number: int) -> None:
            while not done.is_set():
                prompt = PROMPTS[number % len(PROMPTS)]
                number += 1
                try:
                    got = await stream(client, prompt, num_tokens)
                except ShoalError as error:
                    seen[f"failed: {error}"] += 1
                    continue
                seen["whole" if got == expected[prompt] else "cut" if len(got) < num_tokens else "different"] += 1

        async def count_downs() -> int:
            records = (await client.scaling()).records
            return sum(max(0, record.num_before - record.num_after) for record in records)

        async def until_counted(num: int) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while await count_downs() < num:  # noqa: ASYNC110 - the gateway does not call us
                    await asyncio.sleep(LOOK_S)

        keepers = [asyncio.create_task(keep(number)) for number in range(width)]
        while (downs := await count_downs()) < num_downs:
            print(f"{downs} down, {dict(seen)}, {(await client.cluster()).num_resumes} resumed", flush=True)
            await client.tune({"min_replicas": 3, "max_replicas": 3}, reset=False, admin_key=ADMIN_KEY)
            await until_cluster(client, lambda row: num_busy(row) == 3)
            await client.tune({"min_replicas": 1, "max_replicas": 1}, reset=False, admin_key=ADMIN_KEY)
            await until_cluster(client, lambda row: num_connected(row) == 1)
            await until_counted(downs + 2)
        done.set()
        await asyncio.gather(*keepers)
        seen["downs"] = await count_downs()
        seen["resumed"] = (await client.cluster()).num_resumes
    return seen


def num_busy(row: ClusterRow) -> int:
    return sum(r.connected and r.stats is not None and r.stats.num_running > 0 for r in row.replicas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--downs", type=int, default=50)
    parser.add_argument("--width", type=int, default=6, help="streams at once")
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--drain-timeout-s", type=float, default=1.0, help="what is longer is cut and resumed")
    options = parser.parse_args()
    document, _ = read_config(ROOT / "deploy" / "serve" / "local.yaml")
    args = document["applications"][0]["args"]
    address = free_address()
    args["gateway"].update(grpc_address=address, http_address=free_address(), admin_key=ADMIN_KEY)
    args["scaling"] = {"min_replicas": 1, "max_replicas": 3}
    args["replica"].update(dtype="float32", drain_timeout_s=options.drain_timeout_s)
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        started = time.monotonic()
        seen = asyncio.run(measure(address, options.downs, options.width, options.tokens))
        print(f"{time.monotonic() - started:.0f} s: {dict(seen)}")


if __name__ == "__main__":
    main()
