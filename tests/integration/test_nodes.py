"""Three Ray nodes on one machine: the gateway on one, a replica on each of the others; a node dies and one joins. Then
one replica whose ranks are on both, and one of these nodes dies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.live_cluster import RANK_TITLE, LiveCluster, actors, free_address, num_connected, until_cluster
from ray.cluster_utils import Cluster

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import LLM, SamplingParams

pytestmark = pytest.mark.integration

CLUSTER_YAML = Path(__file__).parents[2] / "deploy" / "serve" / "cluster.yaml"
WORKER = {"num_cpus": 1, "resources": {"shoal_replica": 1}}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    port = int(free_address().rpartition(":")[2])
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,  # no rank finds room beside the gateway
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": port,
        },
    )
    try:
        nodes.add_node(**WORKER)
        nodes.add_node(**WORKER)
        nodes.dashboard_url = f"http://127.0.0.1:{port}"
        yield nodes
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def spread(nodes: Cluster) -> LiveCluster:
    document, settings = read_config(CLUSTER_YAML)
    grpc_address, http_address = free_address(), free_address()
    args = document["applications"][0]["args"]
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address)
    args["replica"].update(dtype="float32", num_blocks=512)
    deploy(document, nodes.dashboard_url, lambda progress: None)
    return LiveCluster(
        grpc_address, http_address, nodes.dashboard_url, settings.name, Path(nodes.head_node.get_temp_dir_path()), ""
    )


def call(text: str, max_tokens: int) -> GenerateCall:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateCall(request_id=uuid.uuid4().hex, text=text, sampling_params=params, timeout_s=120)


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def is_spread(row: ClusterRow) -> bool:
    """The former replicas are gone, and the only one cannot say how much memory its ranks' nodes have."""
    return [(r.connected, " of " in r.start_report) for r in row.replicas] == [(True, False)]


def nodes_of_ranks(nodes: Cluster) -> list[Any]:
    """The node of each living rank: a worker process is a child of its node's raylet."""
    found = []
    for node in nodes.list_all_nodes():
        (raylet,) = node.all_processes["raylet"]
        found += [node for _ in actors(raylet.process.pid, RANK_TITLE)]
    return found


async def test_a_lost_node_costs_no_request_and_its_capacity_comes_back(nodes: Cluster, spread: LiveCluster):
    async with GatewayClient(spread.grpc_address) as client:
        row = await until_cluster(client, lambda row: num_connected(row) == 2)
        node_ids = {replica.node_id for replica in row.replicas}
        assert len(node_ids) == 2
        assert nodes.head_node.node_id not in node_ids

        async def run(number: int) -> tuple[list[int], str, int]:
            tokens: list[int] = []
            usage = None
            async for chunk in client.generate(call(f"{number} is the number of", 100)):
                tokens.extend(chunk.token_ids)
                usage = chunk.usage or usage
                if len(tokens) >= 10:  # a message may carry several
                    reached.add(number)
                    if len(reached) == 6:
                        all_reached.set()
            assert usage is not None
            return tokens, usage.replica_id, usage.num_resumes

        reached: set[int] = set()
        all_reached = asyncio.Event()
        tasks = [asyncio.create_task(run(number)) for number in range(6)]
        async with asyncio.timeout(60):
            await all_reached.wait()
        lost_node = next(node for node in nodes.worker_nodes if node.node_id in node_ids)
        await asyncio.to_thread(nodes.remove_node, lost_node, allow_graceful=False)
        disturbed = await asyncio.gather(*tasks)
        assert sum(num_resumes for _, _, num_resumes in disturbed) >= 1

        nodes.add_node(**WORKER)  # in this thread: Ray sets signal handlers
        row = await until_cluster(client, lambda row: num_connected(row) == 2)
        assert lost_node.node_id not in {r.node_id for r in row.replicas if r.connected}
        undisturbed = await asyncio.gather(*(run(number) for number in range(6)))
        assert [tokens for tokens, _, _ in disturbed] == [tokens for tokens, _, _ in undisturbed]
        assert len({replica_id for _, replica_id, _ in undisturbed}) == 2


async def test_a_replica_whose_ranks_are_on_two_nodes_loses_one(nodes: Cluster, spread: LiveCluster):
    """Each node has room for one rank: the ranks meet by the nodes' addresses and give the whole model's tokens."""
    document, settings = read_config(CLUSTER_YAML)
    args, grpc_address = document["applications"][0]["args"], free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=free_address(), placement_timeout_s=120)
    args["replica"].update(
        dtype="float32", num_blocks=512, tensor_parallel_size=2, placement_strategy="PACK", engine_num_cpus=0
    )
    args["scaling"].update(min_replicas=1, max_replicas=1)
    await asyncio.to_thread(deploy, document, spread.dashboard_url, lambda progress: None)
    text = "The number of the sea is"
    with LLM(settings.model, dtype="float32", num_blocks=64) as llm:
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        expected = llm.generate(text, params)[0].token_ids
    async with GatewayClient(grpc_address) as client:
        (replica,) = (await until_cluster(client, is_spread)).replicas
        assert replica.start_report.startswith("cpu, float32: weights ")
        homes = nodes_of_ranks(nodes)
        assert len({node.node_id for node in homes}) == len(homes) == 2
        (lost_node,) = (node for node in homes if node.node_id != replica.node_id)

        chunks: list[Chunk] = []
        async for chunk in client.generate(call(text, 100)):
            chunks.append(chunk)
            if lost_node is not None and len(tokens(chunks)) >= 10:
                nodes.remove_node(lost_node, allow_graceful=False)
                nodes.add_node(**WORKER)
                lost_node = None
        assert tokens(chunks) == expected
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.num_resumes >= 1
        homes = nodes_of_ranks(nodes)
        assert len({node.node_id for node in homes}) == len(homes) == 2
        assert tokens([chunk async for chunk in client.generate(call(text, 100))]) == expected
