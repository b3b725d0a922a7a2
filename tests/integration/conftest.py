"""A real local cluster for the tests: Ray, two replicas of the demo model, one gateway, on free ports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.live_cluster import LiveCluster, free_address

from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay

LOCAL_YAML = Path(__file__).parents[2] / "deploy" / "serve" / "local.yaml"


@pytest.fixture(scope="session")
def cluster() -> Iterator[LiveCluster]:
    document, settings = read_config(LOCAL_YAML)
    grpc_address, http_address = free_address(), free_address()
    args = document["applications"][0]["args"]
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address)
    args["replica"]["dtype"] = "float32"  # tokens then do not depend on what shares their batch
    with LocalRay(num_cpus=4) as ray:
        ray.wait_until_up()
        before = dict(os.environ)
        os.environ.update(ray.environment)
        try:
            deploy(document, ray.dashboard_url, lambda progress: None)
            yield LiveCluster(grpc_address, http_address, ray.dashboard_url, settings.name)
        finally:
            os.environ.clear()
            os.environ.update(before)
