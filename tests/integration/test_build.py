"""``build(args)``: an error in the YAML is reported in one line, before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from ray.serve._private.version import DeploymentVersion

from shoal_cluster.serve.app import build
from shoal_cluster.serve.gateway import Gateway
from shoal_cluster.serve.replica_server import ReplicaServer
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.errors import ConfigError, NotFound, ShoalError

WRONG = [
    ({}, "model: required"),
    ({"model": "no/such/folder"}, "no/such/folder"),
    ({"model": DEMO_MODEL, "replicas": 3}, "replicas: unknown key"),
    ({"model": DEMO_MODEL, "replica": {"blocksize": 16}}, "replica.blocksize: unknown key"),
    ({"model": DEMO_MODEL, "replica": {"block_size": "big"}}, "replica.block_size: got 'big'"),
    ({"model": DEMO_MODEL, "replica": {"num_blocks": 0}}, "replica.num_blocks: got 0"),
    ({"model": DEMO_MODEL, "replica": {"max_model_len": 10**6}}, "max_model_len: got 1000000; the model allows 1 to"),
    ({"model": DEMO_MODEL, "replica": {"num_blocks": 10**9}}, "num_blocks"),
    ({"model": DEMO_MODEL, "replica": {"max_num_seqs": 64, "max_num_batched_tokens": 8}}, "max_num_batched_tokens"),
    ({"model": DEMO_MODEL, "scaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas"),
    ({"model": DEMO_MODEL, "gateway": {"grpc_address": "here"}}, "gateway.grpc_address: got 'here'"),
]


@pytest.mark.parametrize(("args", "said"), WRONG)
def test_a_wrong_configuration_is_one_line(args, said):
    with pytest.raises(ShoalError) as caught:
        build(args)
    assert isinstance(caught.value, ConfigError | NotFound)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(NotFound, match=r"config\.json"):
        build({"model": str(tmp_path)})


def test_gateways_are_told_their_settings_at_each_start():
    """Serve does not tell them that there are none where ``user_config`` is None."""
    assert build({"model": DEMO_MODEL})._bound_deployment.user_config == {}


def test_serve_s_hooks_run_on_the_event_loop_not_in_threads():
    """It runs hooks that are not async in threads, beside the loop that changes what they read."""
    names = "check_health", "reconfigure", "record_replica_metadata", "record_autoscaling_stats", "record_routing_stats"
    hooks = [
        vars(deployment)[name] for deployment in (Gateway, ReplicaServer) for name in names if name in vars(deployment)
    ]
    assert len(hooks) == 6
    assert all(map(inspect.iscoroutinefunction, hooks))


def test_each_build_has_a_policy_of_its_own():
    """Serve would not take up again one that it has forgotten, if it is equal to the last."""
    first, second = (build({"model": DEMO_MODEL})._bound_deployment.init_args[0]._bound_deployment for _ in range(2))
    assert first._deployment_config.autoscaling_config.policy != second._deployment_config.autoscaling_config.policy
    versions = [
        DeploymentVersion("1", replicas._deployment_config, replicas._replica_config.ray_actor_options)
        for replicas in (first, second)
    ]
    assert not versions[0].requires_actor_restart(versions[1]), "replicas stay"


def test_the_application_names_its_deployments():
    application = build({"model": DEMO_MODEL, "served_model_name": "sea"})
    assert application._bound_deployment.name == "Gateway"
