"""What `shoal deploy` waits for: the new version runs and nothing of the former one is left."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_cluster.commands.deploy import is_done, progress, replaced

ARGS = {"model": "m", "replica": {"num_blocks": 9}, "schedules": []}


def application(
    *replicas: tuple[str, str], status: str = "RUNNING", wanted: int = 1, settled: bool = False
) -> dict[str, Any]:
    """An application as Serve reports it, as far as that is read: one deployment with (id, state) replicas."""
    deployment = {
        "status": "HEALTHY" if settled else "UPSCALING",
        "target_num_replicas": wanted,
        "replicas": [{"replica_id": replica_id, "state": state} for replica_id, state in replicas],
        "deployment_config": {"graceful_shutdown_timeout_s": 60.0},
    }
    config = {"name": "shoal", "import_path": "a:b", "args": ARGS, "runtime_env": {}}
    return {"status": status, "deployed_app_config": config, "deployments": {"ReplicaServer": deployment}}


def test_only_new_code_or_arguments_replace_what_runs() -> None:
    present = {"shoal": application(("old", "RUNNING"))}
    same = {"name": "shoal", "import_path": "a:b", "args": ARGS, "deployments": [{"name": "ReplicaServer"}]}
    assert replaced(present, {"applications": [same]}) == (frozenset(), 0.0)
    assert replaced(present, {"applications": [same | {"args": ARGS | {"schedules": ()}}]}) == (frozenset(), 0.0)
    assert replaced({}, {"applications": [same]}) == (frozenset(), 0.0)
    for change in ({"args": {"model": "n"}}, {"import_path": "c:d"}, {"runtime_env": {"env_vars": {"A": "1"}}}):
        assert replaced(present, {"applications": [same | change]}) == ({"old"}, 60.0)


@pytest.mark.parametrize(
    "options",
    [{"ray_actor_options": {"num_cpus": 2}}, {"placement_group_strategy": "SPREAD"}, {"max_replicas_per_node": 1}],
)
def test_other_options_of_the_actors_replace_what_runs(options: dict[str, Any]) -> None:
    present = application(("old", "RUNNING"))
    wanted = present["deployed_app_config"] | {"deployments": [{"name": "ReplicaServer", "num_replicas": 2} | options]}
    assert replaced({"shoal": present}, {"applications": [wanted]}) == ({"old"}, 60.0)
    present["deployed_app_config"] = wanted
    in_place = wanted | {"deployments": [{"name": "ReplicaServer", "num_replicas": 3} | options]}
    assert replaced({"shoal": present}, {"applications": [in_place]}) == (frozenset(), 0.0)
    assert replaced({"shoal": present}, {"applications": [wanted | {"deployments": []}]}) == ({"old"}, 60.0)
    another = wanted | {"deployments": [*wanted["deployments"], {"name": "Gateway"} | options]}
    assert replaced({"shoal": present}, {"applications": [another]}) == (frozenset(), 0.0)


@pytest.mark.parametrize(
    ("num_replicas", "share", "num_drains"), [(1, 0.2, 1), (9, 0.2, 9), (100, 0.2, 10), (8, 1.0, 2)]
)
def test_batch_after_batch_drains(num_replicas: int, share: float, num_drains: int) -> None:
    """A fifth of 9 is rounded down to 1: replicas drain one after another."""
    present = application(*((f"r{i}", "RUNNING") for i in range(num_replicas)))
    present["deployments"]["ReplicaServer"]["deployment_config"]["rolling_update_percentage"] = share
    wanted = present["deployed_app_config"] | {"args": {"model": "n"}}
    assert replaced({"shoal": present}, {"applications": [wanted]})[1] == 60.0 * num_drains


def test_an_application_that_goes_drains_at_once() -> None:
    gone = application(("a", "RUNNING"), ("b", "RUNNING"))
    assert replaced({"other": gone}, {"applications": [{"name": "shoal"}]}) == ({"a", "b"}, 60.0)


def test_what_serve_keeps_is_not_waited_for() -> None:
    """Options written out with the values they had: the deployment is healthy with its former replicas."""
    former = frozenset({"old"})
    assert is_done({"shoal": application(("old", "RUNNING"), settled=True)}, former)
    assert not is_done({"shoal": application(("old", "RUNNING"), status="DEPLOYING", settled=True)}, former)


def test_it_is_done_when_the_new_runs_and_the_old_is_gone() -> None:
    former = frozenset({"old"})
    story = [
        (application(("old", "RUNNING")), "ReplicaServer 0/1 (1 of the former version left)"),
        (application(("old", "STOPPING"), ("new", "STARTING")), "ReplicaServer 0/1 (1 of the former version left)"),
        (application(("old", "STOPPING"), ("new", "RUNNING")), "ReplicaServer 1/1 (1 of the former version left)"),
        (application(("new", "STARTING")), "ReplicaServer 0/1"),
        (application(("new", "RUNNING"), status="DEPLOYING"), "ReplicaServer 1/1"),
    ]
    for present, told in story:
        assert not is_done({"shoal": present}, former)
        assert progress({"shoal": present}, former) == told
    for present in (
        application(("new", "RUNNING")),
        application(("new", "RUNNING"), ("more", "STARTING"), wanted=2),  # the autoscaler added it: not waited for
        application(wanted=0),
    ):
        assert is_done({"shoal": present}, former)
