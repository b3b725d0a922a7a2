"""A Ray cluster with two NPUs: ``deploy/serve/npu.yaml`` serves gRPC from a replica on each, then from one on both."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.live_cluster import free_address, num_connected, until_cluster
from npu_models import GREEDY, NUM_TOKENS, Expected, make_folder

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_replica.llm import RequestOutput, SequenceOutput

pytestmark = pytest.mark.timeout(900)  # it includes the start of the cluster

NPU_YAML = Path(__file__).parents[2] / "deploy" / "serve" / "npu.yaml"
PROMPTS = [f"{start} the sea is deep, and the wind is on the water" * 3 for start in ("When", "Why", "Now", "If")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def ray() -> Iterator[LocalRay]:
    with LocalRay(num_cpus=4, resources={"NPU": 2}) as ray:
        ray.wait_until_up()
        yield ray


async def serve(ray: LocalRay, folder: Path, num_replicas: int, **replica: Any) -> str:
    """Deploy the file with a small model. Returns the gateway's gRPC address."""
    document, settings = read_config(NPU_YAML)
    assert settings.replica.device == "npu"
    assert settings.replica.block_size == 128
    args, address = document["applications"][0]["args"], free_address()
    args["model"] = str(folder)
    args["replica"].update(num_cpus=0.5, max_num_seqs=4, feed_host="127.0.0.1", drain_timeout_s=5, **replica)
    args["scaling"].update(min_replicas=num_replicas, max_replicas=num_replicas)
    args["gateway"].update(grpc_address=address, http_address=free_address(), placement_timeout_s=60)
    await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
    return address


async def test_two_replicas_serve_from_an_npu_each(ray: LocalRay, folder: Path) -> None:
    async with GatewayClient(await serve(ray, folder, num_replicas=2)) as client:
        streams = await asyncio.gather(*(collect(client, prompt) for prompt in PROMPTS * 2))
        cluster = await client.cluster()
    rows = [row.stats for row in cluster.replicas]
    assert len(rows) == 2
    for stats in rows:
        assert stats is not None
        assert stats.block_size == 128
        assert stats.num_total_blocks > 1000  # what 1 GiB leaves: each replica has a device to itself
        assert stats.num_generated_tokens > 0
    expected = Expected.of(folder, PROMPTS)
    for half in (streams[: len(PROMPTS)], streams[len(PROMPTS) :]):
        expected.check([as_output(chunks) for chunks in half])


async def test_a_replica_of_two_ranks_has_an_npu_for_each(ray: LocalRay, folder: Path) -> None:
    """Ray gives each rank a device: two ranks on one device cannot form a group."""
    async with GatewayClient(await serve(ray, folder, 1, tensor_parallel_size=2, num_blocks=32)) as client:
        (row,) = (await until_cluster(client, lambda cluster: num_connected(cluster) == 1)).replicas
        assert row.start_report.startswith("npu, bfloat16: weights ")
        streams = await asyncio.gather(*(collect(client, prompt) for prompt in PROMPTS))
    Expected.of(folder, PROMPTS).check([as_output(chunks) for chunks in streams])


async def collect(client: GatewayClient, prompt: str) -> list[Chunk]:
    call = GenerateCall(request_id=uuid.uuid4().hex, text=prompt, sampling_params=GREEDY, timeout_s=60)
    return [chunk async for chunk in client.generate(call)]


def as_output(chunks: list[Chunk]) -> RequestOutput:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == NUM_TOKENS
    return RequestOutput((), [SequenceOutput(tokens)])
