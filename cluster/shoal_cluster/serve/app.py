"""``build(args)``: from the YAML's ``args`` to a Serve application. Everything is checked before a replica starts."""

from __future__ import annotations

import sys
import uuid
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from shoal_cluster.config import ClusterConfig, ReplicaSettings
from shoal_cluster.gateway_settings import with_keys
from shoal_cluster.policies.autoscaling_config import MAX_REPLICAS, ScaleConfig
from shoal_cluster.serve.engine_config import engine_config
from shoal_cluster.serve.gateway import Gateway
from shoal_cluster.serve.rank_actors import DEVICE_RESOURCES, replica_bundles
from shoal_cluster.serve.redeployment import first_count
from shoal_cluster.serve.replica_server import ReplicaServer
from shoal_cluster.serve.request_router import BlockRouter

# For both deployments and their handles: calls between actors go by gRPC, and a gateway has one event loop, so that its
# router and the gateway itself share the ledger without locks.
ENVIRONMENT = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**26),  # of a call, which carries its prompt's tokens; 4 MiB else
}

LOGGING = {"enable_access_log": False}  # a line for each call, in addition to the gateway's own

CLOSE_S = 15.0
"""For a gateway to close after its answers have ended, before Serve kills it."""


def build(args: dict[str, Any]) -> Application:
    """Bind the gateway to the replicas.

    Raises:
        ConfigError, NotFound: one line that names what is wrong in ``args``.
    """
    config = ClusterConfig.from_args(with_keys(args))
    _check_model(config)
    replica, gateway = config.replica, config.gateway
    replicas = serve.deployment(ReplicaServer).options(
        name="ReplicaServer",
        num_replicas=None,
        max_ongoing_requests=replica.max_ongoing,
        max_replicas_per_node=replica.max_replicas_per_node,
        graceful_shutdown_timeout_s=replica.drain_timeout_s,
        health_check_period_s=1,
        health_check_timeout_s=10,
        logging_config=LOGGING,
        **_resources(replica),
        autoscaling_config=_autoscaling(config.scale_config(), args),
        request_router_config=RequestRouterConfig(request_router_class=BlockRouter),
    )
    front = serve.deployment(Gateway).options(
        name="Gateway",
        num_replicas=gateway.num_replicas,
        user_config={},  # not None: so Serve also tells gateways when the YAML has none, or none any more
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=gateway.drain_timeout_s + CLOSE_S,
        max_surge_percent=100,  # an update starts the next gateway before it stops the former one
        health_check_period_s=2,
        health_check_timeout_s=10,
        logging_config=LOGGING,
        ray_actor_options=_actor(gateway.num_cpus, gateway.resources),
    )
    config_without_secrets = config.model_copy(update={"gateway": config.gateway.without_secrets()})
    return front.bind(replicas.bind(config_without_secrets), config)


def _resources(replica: ReplicaSettings) -> dict[str, Any]:
    """Resources of a replica's only process, or of its engine's process and the placement group for its ranks."""
    if replica.num_ranks == 1:
        resources = replica.resources | DEVICE_RESOURCES[replica.device]
        return {"ray_actor_options": _actor(replica.num_cpus, resources)}
    return {
        "ray_actor_options": _actor(replica.engine_num_cpus, replica.resources),
        "placement_group_bundles": replica_bundles(replica),
        "placement_group_strategy": replica.placement_strategy,
    }


def _actor(num_cpus: float, resources: dict[str, float]) -> dict[str, Any]:
    return {"num_cpus": num_cpus, "resources": resources, "runtime_env": {"env_vars": ENVIRONMENT}}


def _autoscaling(settings: ScaleConfig, args: dict[str, Any]) -> AutoscalingConfig:
    """Serve's own bounds are wide and its delays zero: those of the policy can change without a new deployment."""
    return AutoscalingConfig(
        min_replicas=0,
        max_replicas=MAX_REPLICAS,
        initial_replicas=first_count(args, settings),
        metrics_interval_s=1,
        look_back_period_s=2,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(
            policy_function="shoal_cluster.serve.autoscaler:BlockScaling",
            # The id is another each time: Serve has forgotten the policy if a deployment failed in between, and would
            # not take it up again with one that is the same as before.
            policy_kwargs={"settings": msgspec.to_builtins(settings), "build_id": uuid.uuid4().hex},
        ),
    )


def _check_model(config: ClusterConfig) -> None:
    """Check that model and adapters exist and fit the largest node. Whether they fit an NPU, the replica finds out."""
    nodes = [n["Resources"].get("memory", 0) for n in ray.nodes() if n["Alive"]] if ray.is_initialized() else []
    is_unknown = config.replica.device == "npu"
    engine_config(config, sys.maxsize if is_unknown else int(max(nodes)) if nodes else None)
