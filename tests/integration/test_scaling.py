"""A real cluster that grows under load and shrinks after it, to nothing and back, with every request answered."""

from __future__ import annotations

import asyncio
import itertools
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
ADMIN_KEY = "live"


class Load:
    """Keeps ``width`` requests open, each of about 800 prompt tokens that no other shares."""

    def __init__(self, client: GatewayClient, width: int) -> None:
        self.reasons: list[FinishReason | None] = []
        self._client = client
        self._width = width
        self._open: set[asyncio.Task[FinishReason | None]] = set()
        self._number = 0

    async def turn(self) -> None:
        """Top up, wait for one to end or a moment."""
        while len(self._open) < self._width:
            self._open.add(asyncio.create_task(run(self._client, self._number)))
            self._number += 1
        done, self._open = await asyncio.wait(self._open, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        self.reasons += [task.result() for task in done]

    async def finish(self) -> None:
        self.reasons += await asyncio.gather(*self._open)


async def run(client: GatewayClient, number: int) -> FinishReason | None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    text = f"{number} " * 400
    call = GenerateCall(request_id=uuid.uuid4().hex, text=text, sampling_params=params, timeout_s=120)
    return [chunk.finish_reason async for chunk in client.generate(call)][-1]


async def num_connected(client: GatewayClient) -> int:
    return sum(replica.connected for replica in (await client.cluster()).replicas)


async def test_none_one_three_one_none(local_yaml):
    document, _ = read_config(local_yaml)
    args = document["applications"][0]["args"]
    grpc_address = free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=free_address(), admin_key=ADMIN_KEY)
    args["scaling"] = {"min_replicas": 0, "max_replicas": 2, "downscale_delay_s": 3}
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        async with GatewayClient(grpc_address) as client:
            assert await num_connected(client) == 0
            assert await run(client, 0) is FinishReason.LENGTH  # held until there is one

            await client.tune({"max_replicas": 3, "min_replicas": 1}, reset=False, admin_key=ADMIN_KEY)
            load = Load(client, 16)
            async with asyncio.timeout(180):
                while await num_connected(client) < 3:
                    await load.turn()
                await load.finish()
            assert set(load.reasons) == {FinishReason.LENGTH}
            async with asyncio.timeout(120):
                while await num_connected(client) > 1:
                    assert await run(client, 0) is FinishReason.LENGTH

            await client.tune({}, reset=True, admin_key=ADMIN_KEY)
            async with asyncio.timeout(60):
                while await num_connected(client) > 0:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.2)
                while (await client.scaling()).records[-1].num_after != 0:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.2)
            steps = [(record.num_before, record.num_after) for record in (await client.scaling()).records]
            assert steps[0] == (0, 1)
            assert all(after == before for (_, after), (before, _) in itertools.pairwise(steps))
            assert max(after for _, after in steps) == 3
            assert steps[-1] == (1, 0)
