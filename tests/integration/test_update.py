"""A change of ``args`` while clients call, where the nodes do not hold all the replicas that the new version wants."""

from __future__ import annotations

import asyncio
import uuid

import httpx
import pytest
from fixtures.live_cluster import actors, free_address, num_connected, until_cluster

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import SamplingParams

pytestmark = pytest.mark.integration
REPLICA_TITLE = "ray::ServeReplica:shoal:ReplicaServer"
BETWEEN_CALLS_S = 0.05


async def test_an_update_refuses_no_call_and_replicas_lost_meanwhile_are_replaced(local_yaml, monkeypatch):
    """Serve calls the update unfinished until both replicas run. It must replace what is lost before, however often."""
    monkeypatch.setenv("RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT", "1")  # at Serve's own 3 it would take six losses
    document, _ = read_config(local_yaml.with_name("cluster.yaml"))
    args, grpc_address, http_address = document["applications"][0]["args"], free_address(), free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address, placement_timeout_s=90)
    args["replica"].update(num_blocks=256)
    args["scaling"].update(min_replicas=1, max_replicas=1)
    with LocalRay(num_cpus=4, resources={"shoal_replica": 1}) as ray:
        ray.wait_until_up()
        await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
        async with GatewayClient(grpc_address) as client:
            await until_cluster(client, lambda row: num_connected(row) == 1)
        args["scaling"].update(min_replicas=2, max_replicas=2)  # there is room for one
        update = asyncio.create_task(asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None))
        num_answers = await asyncio.gather(call_until(update, grpc_address), ask_until(update, http_address))
        assert min(num_answers) > 10
        await update
        async with GatewayClient(grpc_address) as client:
            lost: set[str] = set()
            for _ in range(3):  # Serve itself would give up after the second
                lost |= await lose_replica(client, ray, lost)
            await call(client)


async def call_until(update: asyncio.Task[None], address: str) -> int:
    """Call by connections of their own until the update is done. Returns how many answers came: all."""
    num_answers = 0
    while not update.done():
        async with GatewayClient(address) as client:
            await call(client)
        num_answers += 1
        await asyncio.sleep(BETWEEN_CALLS_S)
    return num_answers


async def ask_until(update: asyncio.Task[None], address: str) -> int:
    num_answers = 0
    while not update.done():
        async with httpx.AsyncClient(timeout=60) as http:
            reply = await http.get(f"http://{address}/v1/models")
        assert reply.status_code == 200
        num_answers += 1
        await asyncio.sleep(BETWEEN_CALLS_S)
    return num_answers


async def call(client: GatewayClient) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    request = GenerateCall(request_id=uuid.uuid4().hex, text="The sea is", sampling_params=params, timeout_s=90)
    chunks = [chunk async for chunk in client.generate(request)]
    assert chunks[-1].finish_reason == "length"


async def lose_replica(client: GatewayClient, ray: LocalRay, lost: set[str]) -> set[str]:
    """Kill the only replica, once it is none of those ``lost`` before. Returns its id."""

    def connected(row: ClusterRow) -> set[str]:
        return {replica.replica_id for replica in row.replicas if replica.connected}

    row = await until_cluster(client, lambda row: num_connected(row) == 1 and not lost & connected(row))
    (victim,) = actors(ray._process.pid, REPLICA_TITLE)
    victim.kill()
    return connected(row)
