"""What `shoal deploy` waits for: the new version runs and nothing of the former is left."""

from __future__ import annotations

from typing import Any

from shoal_cluster.commands.deploy import is_done, progress, replaced

ARGS = {"model": "m", "replica": {"num_blocks": 9}, "schedules": []}


def application(*replicas: tuple[str, str], status: str = "RUNNING", wanted: int = 1) -> dict[str, Any]:
    """As Serve tells it, but for what is not read: one deployment with (id, state) replicas."""
    deployment = {
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
        application(("new", "RUNNING"), ("more", "STARTING"), wanted=2),  # the autoscaler's, for which no one waits
        application(wanted=0),
    ):
        assert is_done({"shoal": present}, former)
