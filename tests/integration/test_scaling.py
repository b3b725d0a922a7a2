"""A real cluster that grows under load and shrinks after it, with every request answered."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from fixtures.live_cluster import free_address

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.call import GenerateCall
from shoal_replica import SamplingParams
from shoal_replica.request import FinishReason

pytestmark = pytest.mark.integration


async def test_one_replica_becomes_two_and_one_again(local_yaml):
    document, _ = read_config(local_yaml)
    args = document["applications"][0]["args"]
    grpc_address = free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=free_address())
    args["scaling"] = {"min_replicas": 1, "max_replicas": 2, "target_waiting_tokens": 1000, "downscale_delay_s": 3}
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        async with GatewayClient(grpc_address) as client:

            async def num_connected() -> int:
                return sum(replica.connected for replica in (await client.cluster()).replicas)

            async def run(number: int) -> FinishReason | None:
                params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
                text = f"{number} " * 400
                call = GenerateCall(request_id=uuid.uuid4().hex, text=text, sampling_params=params, timeout_s=120)
                return [chunk.finish_reason async for chunk in client.generate(call)][-1]

            assert await num_connected() == 1
            load: set[asyncio.Task[FinishReason | None]] = set()
            number = 0
            reasons = []
            async with asyncio.timeout(120):
                while await num_connected() < 2:
                    while len(load) < 12:
                        load.add(asyncio.create_task(run(number)))
                        number += 1
                    done, load = await asyncio.wait(load, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                    reasons += [task.result() for task in done]
                reasons += await asyncio.gather(*load)
            assert set(reasons) == {FinishReason.LENGTH}
            async with asyncio.timeout(120):
                while await num_connected() > 1:
                    assert await run(0) is FinishReason.LENGTH
