"""Serve's own application-level scaling calls our policy, which sizes one pool by load, another in proportion."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fixtures.cluster_views import make_stats
from fixtures.memory_store import MemoryStore
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.serve.pool_scaling import PoolScaling
from shoal_cluster.serve.recorded_stats import ledger_metrics
from shoal_cluster.serve.scaling_board import GatewayReport, ScalingBoard
from shoal_cluster.serve.scaling_link import BoardLink, Inbox
from shoal_replica.errors import ConfigError

pytestmark = pytest.mark.integration  # needs Ray's types, but no cluster
BASE = ScaleConfig(min_replicas=1, max_replicas=9, downscale_delay_s=0.0, headroom=0.0, burst_memory_s=0.0)
SIZED, IN_RATIO, OTHER = (DeploymentID(name=name, app_name="app") for name in ("ReplicaServer", "Prefill", "Other"))


class Application:
    """Serve's autoscaling state of an application, whose policy is registered as from the YAML."""

    def __init__(self, **kwargs: Any) -> None:
        self.state = ApplicationAutoscalingState("app")
        settings = {"settings": msgspec.to_builtins(BASE), **kwargs}
        path = "shoal_cluster.serve.pool_scaling:PoolScaling"
        self.state.register(AutoscalingPolicy(policy_function=path, policy_kwargs=settings))
        self.targets: dict[DeploymentID, int] = {}
        policy = self.state._policy.__wrapped__  # type: ignore[union-attr]
        self.link = policy._policy._link = BoardLink(ScalingBoard("app", MemoryStore()))
        self.link.stop()
        self.link._thread.join()
        policy._policy._export.publish_if_due = lambda points, now: None

    def deploy(self, deployment_id: DeploymentID, count: int) -> None:
        """Let a deployment run ``count`` replicas, all idle."""
        scaling = AutoscalingConfig(min_replicas=0, max_replicas=1000, upscale_delay_s=0, downscale_delay_s=0)
        info = DeploymentInfo(
            deployment_config=DeploymentConfig(autoscaling_config=scaling),
            replica_config=ReplicaConfig.create(lambda: None),
            start_time_ms=0,
            deployer_job_id="",
        )
        if deployment_id not in self.targets:
            self.state.register_deployment(deployment_id, info, count)
        self.targets[deployment_id] = count
        running = [ReplicaID(f"r{i}", deployment_id) for i in range(count)]
        self.state.update_running_replica_ids(deployment_id, running)
        now = time.time()
        for replica_id in running:
            ledger = {n: [TimeStampedValue(now, float(v))] for n, v in ledger_metrics(make_stats()).items()}
            self.state.record_request_metrics_for_replica(ReplicaMetricReport(replica_id, ledger, now))

    def decide(self, **changes: Any) -> dict[DeploymentID, int]:
        """The counts that Serve sets, with a gateway that reports these settings."""
        report = GatewayReport("g", time.time(), Demand(num_requests=1), {}, replace(BASE, **changes), 1)
        self.link.inbox = Inbox((report,), tuning=None)
        decided: dict[DeploymentID, int] = self.state.get_decision_num_replicas(self.targets)
        return decided


def test_a_pool_is_sized_and_another_follows_in_proportion() -> None:
    app = Application(ratios={"Prefill": 0.5})
    for deployment_id, count in ((SIZED, 2), (IN_RATIO, 1), (OTHER, 3)):
        app.deploy(deployment_id, count)
    assert app.decide(min_replicas=4) == {SIZED: 4, IN_RATIO: 2}, "the one that is not named is left alone"
    app.deploy(SIZED, 4)
    assert app.decide(min_replicas=5) == {SIZED: 5, IN_RATIO: 3}


def test_it_goes_by_the_ledgers_that_serve_carries() -> None:
    app = Application()
    app.deploy(SIZED, 2)
    app.decide()
    assert app.link._last is not None
    rows = app.link._last.replicas
    assert [(row.replica_id, row.stats is not None and row.stats.num_total_blocks) for row in rows] == [
        ("r0", 100),
        ("r1", 100),
    ]


def test_without_the_pool_nothing_moves() -> None:
    app = Application(ratios={"Prefill": 0.5})
    app.deploy(IN_RATIO, 2)
    assert app.decide() == {}


@pytest.mark.parametrize("ratios", [{"Prefill": 0.0}, {"Prefill": float("nan")}, {"ReplicaServer": 2.0}])
def test_wrong_ratios_are_named(ratios: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ratios: got"):
        PoolScaling(msgspec.to_builtins(BASE), ratios=ratios)
