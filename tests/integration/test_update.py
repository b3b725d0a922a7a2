"""A change of ``args`` while clients call, one of them for so long that Serve calls the update unfinished meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from typing import Any

import httpx
import pytest
from fixtures.live_cluster import CHANGE_TIMEOUT_S, free_address, num_connected, until_cluster
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.call import GenerateCall
from shoal_replica import SamplingParams
from shoal_replica.errors import ConfigError

pytestmark = pytest.mark.integration
BETWEEN_CALLS_S = 0.05
LOOK_S = 0.2
LAST_CALLS_S = 1.0  # after Serve has begun to stop the former gateway


async def test_an_update_refuses_no_call_and_what_is_lost_meanwhile_is_replaced(local_yaml, monkeypatch):
    """Serve replaces what is lost, however often. And scaling goes on after a deployment that failed, and the next."""
    monkeypatch.setenv("RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT", "1")  # by itself, it would give up after one loss
    document, _ = read_config(local_yaml.with_name("cluster.yaml"))
    args, grpc_address, http_address = document["applications"][0]["args"], free_address(), free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address, placement_timeout_s=90)
    args["replica"].update(num_blocks=512, num_speculative_tokens=0, kv_transfer=False)  # answers stay until they end
    args["scaling"].update(min_replicas=1, max_replicas=1)
    with LocalRay(num_cpus=4, resources={"shoal_replica": 2}) as ray:
        ray.wait_until_up()
        await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
        serve = ServeSubmissionClient(ray.dashboard_url)
        async with GatewayClient(grpc_address) as client:
            await until_cluster(client, lambda row: num_connected(row) == 1)
            long_call = asyncio.create_task(call(client, max_tokens=8000))
            args["replica"].update(num_blocks=256)
            update = asyncio.create_task(update_to(document, serve))
            await asyncio.gather(update, call_until(update, grpc_address), ask_until(update, http_address))
            async with GatewayClient(grpc_address) as next_client:
                lost: set[str] = set()
                for _ in range(3):
                    lost |= await lose_replica(next_client, serve, lost)
                await call(next_client)
            assert not long_call.done(), "the update has ended too soon to show anything"
            long_call.cancel()
        wrong = document["applications"][0] | {"deployments": [{"name": "Replicas"}]}
        with pytest.raises(ConfigError, match="Replicas"):
            await asyncio.to_thread(deploy, {**document, "applications": [wrong]}, ray.dashboard_url, lambda _: None)
        await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
        corrected_s = time.time()
        async with GatewayClient(grpc_address) as client, asyncio.timeout(CHANGE_TIMEOUT_S):
            while not (latest := (await client.scaling()).current) or latest.time_s < corrected_s:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)


async def update_to(document: dict[str, Any], serve: ServeSubmissionClient) -> None:
    """Deploy; return when only new replicas and gateways run. ``deploy`` would wait until no other is left."""
    former = {r["replica_id"] for running in (await all_running(serve)).values() for r in running}
    await asyncio.to_thread(serve.deploy_applications, document)
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while True:
            running = await all_running(serve)
            ids = {r["replica_id"] for each in running.values() for r in each}
            if len(running) == 2 and all(running.values()) and former.isdisjoint(ids):
                break
            await asyncio.sleep(LOOK_S)
    await asyncio.sleep(LAST_CALLS_S)


async def all_running(serve: ServeSubmissionClient) -> dict[str, list[dict[str, Any]]]:
    """What runs of each deployment, as Serve tells it. It tells nothing of them while it builds the next version."""
    details = await asyncio.to_thread(serve.get_serve_details)
    deployments = details["applications"]["shoal"]["deployments"]
    return {name: [r for r in each["replicas"] if r["state"] == "RUNNING"] for name, each in deployments.items()}


async def call_until(update: asyncio.Task[None], address: str) -> None:
    """Call by connections of their own until the update is done and replicas of both versions have answered. No call
    may fail.
    """
    replica_ids: set[str] = set()
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not update.done() or len(replica_ids) < 2:
            async with GatewayClient(address) as client:
                replica_ids.add(await call(client))
            await asyncio.sleep(BETWEEN_CALLS_S)


async def ask_until(update: asyncio.Task[None], address: str) -> None:
    """The same for questions to gateways, which say when they were made."""
    made: set[int] = set()
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not update.done() or len(made) < 2:
            async with httpx.AsyncClient(timeout=60) as http:
                reply = await http.get(f"http://{address}/v1/models")
            assert reply.status_code == 200
            made.add(reply.json()["data"][0]["created"])
            await asyncio.sleep(BETWEEN_CALLS_S)


async def call(client: GatewayClient, max_tokens: int = 4) -> str:
    """Returns which replica has answered."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = GenerateCall(request_id=uuid.uuid4().hex, text="The sea is", sampling_params=params, timeout_s=300)
    chunks = [chunk async for chunk in client.generate(request)]
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    return chunks[-1].usage.replica_id


async def lose_replica(client: GatewayClient, serve: ServeSubmissionClient, lost: set[str]) -> set[str]:
    """Kill the only replica that takes calls, once it is none of those ``lost`` before. Returns its id."""

    def is_new(row) -> bool:
        return num_connected(row) == 1 and lost.isdisjoint(r.replica_id for r in row.replicas if r.connected)

    (found,) = (r.replica_id for r in (await until_cluster(client, is_new)).replicas if r.connected)
    (pid,) = (r["pid"] for r in (await all_running(serve))["ReplicaServer"] if r["replica_id"] == found)
    os.kill(pid, signal.SIGKILL)
    return {found}
