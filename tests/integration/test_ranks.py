"""A replica of two ranks behind the gateway: it gives the whole model's tokens, and a lost rank costs none of them."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid

import psutil
import pytest
from fixtures.live_cluster import RANK_TITLE, actors, free_address

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_replica import LLM, SamplingParams

pytestmark = pytest.mark.integration
PROMPT = "The sea is deep because"
PARAMS = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
REPLICA_TITLE = "ray::ServeReplica:shoal:ReplicaServer"
DOWN_LIMIT_S = 5.0


async def test_a_replica_of_two_ranks_loses_one(local_yaml):
    document, settings = read_config(local_yaml.with_name("tensor_parallel.yaml"))
    args = document["applications"][0]["args"]
    args["gateway"].update(grpc_address=free_address(), http_address=free_address(), placement_timeout_s=90)
    args["replica"].update(dtype="float32", num_blocks=256)
    args["scaling"].update(min_replicas=1, max_replicas=1)
    assert settings.replica.num_ranks == 2
    with LLM(settings.model, dtype="float32", num_blocks=256) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].token_ids
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
        async with GatewayClient(args["gateway"]["grpc_address"]) as client:
            assert tokens(await collect(client)) == expected
            group = actors(ray._process.pid, RANK_TITLE)
            assert len(group) == 2
            for sign, place in ((signal.SIGKILL, 1), (signal.SIGSTOP, 0)):
                await lose(client, ray, group[place], sign, expected)
                group = actors(ray._process.pid, RANK_TITLE)
                assert len(group) == 2


async def lose(
    client: GatewayClient, ray: LocalRay, victim: psutil.Process, sign: signal.Signals, expected: list[int]
) -> None:
    """Lose a rank in the middle of a stream: the stream goes on, with new ranks only."""
    before, engines = actors(ray._process.pid, RANK_TITLE), actors(ray._process.pid, REPLICA_TITLE)
    assert len(engines) == 1
    chunks: list[Chunk] = []
    lost_s = 0.0
    async for chunk in client.generate(call()):
        chunks.append(chunk)
        if not lost_s and len(tokens(chunks)) >= 8:
            victim.send_signal(sign)
            lost_s = time.monotonic()
            await asyncio.to_thread(psutil.wait_procs, before, DOWN_LIMIT_S)
            assert not any(process.is_running() for process in before)  # the whole group, within the limit
            _, alive = await asyncio.to_thread(psutil.wait_procs, engines, DOWN_LIMIT_S)
            assert not alive  # it does not wait for health checks to fail
    assert tokens(chunks) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.num_resumes == 1
    print(f"{sign.name}: the stream had ended {time.monotonic() - lost_s:.1f} s after its rank was lost")


def call() -> GenerateCall:
    return GenerateCall(request_id=uuid.uuid4().hex, text=PROMPT, sampling_params=PARAMS, timeout_s=120)


async def collect(client: GatewayClient) -> list[Chunk]:
    return [chunk async for chunk in client.generate(call())]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
