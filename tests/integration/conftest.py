"""A real local cluster for the tests: Ray, two replicas of the demo model, one gateway, on free ports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.live_cluster import LiveCluster, free_address, num_connected, until_cluster
from fixtures.otlp_collector import collecting
from fixtures.tiny_adapters import ATTENTION, make_adapter

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_replica.checkpoint import ensure_checkpoint

os.environ.update(RAY_metrics_report_interval_ms="2000")  # not ten seconds, which tests would wait for

ADMIN_KEY = "session"
HERE = Path(__file__).parent
LOCAL_YAML = HERE.parents[1] / "deploy" / "serve" / "local.yaml"
TIMEOUT_S = 900  # a test's time includes the start of its cluster, and busy machines are slow


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests of the session's cluster come last: once it is up, it takes processor time from the modules' own clusters.
    items.sort(key=lambda item: item.path.parent == HERE and "cluster" in getattr(item, "fixturenames", ()))
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def local_yaml() -> Path:
    return LOCAL_YAML


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    document, settings = read_config(LOCAL_YAML)
    root, base = tmp_path_factory.mktemp("adapters"), ensure_checkpoint(settings.model)
    adapters = {
        name: str(make_adapter(root / name, base, seed, strength=0.1, target_modules=ATTENTION))
        for seed, name in enumerate(("one", "other/two"))
    }
    grpc_address, http_address = free_address(), free_address()
    args = document["applications"][0]["args"]
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address, admin_key=ADMIN_KEY)
    args["replica"]["dtype"] = "float32"  # tokens then do not depend on what shares their batch
    args["adapters"] = adapters
    args["logs"] = {"level": "debug"}
    with collecting() as collector, LocalRay(num_cpus=4) as ray:
        args["traces"] = {"otlp_endpoint": collector.endpoint}
        ray.wait_until_up()
        deploy(document, ray.dashboard_url, lambda progress: None)
        asyncio.run(_all_connected(grpc_address, settings.scaling.min_replicas))
        folder = ray.folder / "ray"
        addresses = (grpc_address, http_address, ray.dashboard_url)
        told = {"collector": collector, "adapters": adapters, "document": document}
        yield LiveCluster(*addresses, settings.name, folder, ADMIN_KEY, **told)


async def _all_connected(address: str, num_replicas: int) -> None:
    """Wait until the gateway knows all replicas: Serve calls a replica running before that."""
    async with GatewayClient(address) as client:
        await until_cluster(client, lambda row: num_connected(row) == num_replicas)
