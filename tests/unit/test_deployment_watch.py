"""The deployment as Serve reports it: read completely, and its changes become events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from fixtures.waiting import until

from shoal_cluster.serve import deployment_watch
from shoal_cluster.serve.deployment_watch import (
    DeploymentRow,
    DeploymentWatch,
    ServeReplica,
    note_changes,
    read_deployment,
)
from shoal_cluster.serve.journal import Journal
from shoal_replica.errors import Unavailable

A = ServeReplica(replica_id="a", state="RUNNING", node_id="n" * 56, started_s=5.0)
B = ServeReplica(replica_id="b", state="STARTING", node_id="", started_s=9.0)
WORDS = ("STARTING", "RUNNING", "HEALTHY", "UNHEALTHY", "UPSCALE_COMPLETED", "REPLICA_STARTUP_FAILED")
Word = Enum("Word", {name: name for name in WORDS}, type=str)  # a string enum, as in Serve
ROW = DeploymentRow(
    num_wanted=2, status="HEALTHY", message="", deployed_s=1.0, replicas=(A,), trigger="UPSCALE_COMPLETED"
)
FAILED = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray::ServeReplica.initialize()
shoal_replica.errors.ConfigError: num_blocks: got 9
The above exception was the cause
"""


def details(*replicas: ServeReplica, **fields: Any) -> dict[str, Any]:
    """Instance details as Serve's controller gives them, as far as they are read."""
    rows = [
        {"replica_id": r.replica_id, "state": Word(r.state), "node_id": r.node_id or None, "start_time_s": r.started_s}
        for r in replicas
    ]
    status = {"status": Word("HEALTHY"), "status_trigger": Word("UPSCALE_COMPLETED"), "message": ""}
    deployment = {"target_num_replicas": 2, "replicas": rows} | status | fields
    return {"applications": {"shoal": {"last_deployed_time_s": 1.0, "deployments": {"ReplicaServer": deployment}}}}


def test_a_deployment_is_read_and_counted() -> None:
    row = read_deployment(details(A, B), "shoal", "ReplicaServer")
    assert row == replace(ROW, replicas=(A, B))
    assert (row.num_in("RUNNING"), row.num_in("STARTING", "STOPPING")) == (1, 1)


@pytest.mark.parametrize(("application", "deployment"), [("other", "ReplicaServer"), ("shoal", "Other")])
def test_what_is_not_deployed_is_none(application: str, deployment: str) -> None:
    assert read_deployment(details(A), application, deployment) is None


def test_a_deployment_that_fails_to_start_says_why() -> None:
    fields = {"status": Word("UNHEALTHY"), "status_trigger": Word("REPLICA_STARTUP_FAILED"), "message": FAILED}
    row = read_deployment(details(**fields), "shoal", "ReplicaServer")
    assert row is not None
    assert row.start_failure == "num_blocks: got 9"
    for trigger in ("HEALTH_CHECK_FAILED", "AUTOSCALING"):  # Serve replaces it, or a first one may still come
        assert replace(row, trigger=trigger).start_failure == ""
    assert replace(row, message="Error:\n\nOSError: no such file\n").start_failure == "OSError: no such file"
    lost = "ray.exceptions.ActorDiedError: ...\nThe actor never ran - it was cancelled before it started running."
    assert replace(row, message=lost).start_failure == "", "its node was lost: the next one may start"


def test_starts_that_fail_beside_a_replica_that_runs_are_no_start_failure() -> None:
    """Serve's trigger stays while a scale-up fails: new requests wait for the replica that runs."""
    failing = replace(ROW, status="UNHEALTHY", trigger="REPLICA_STARTUP_FAILED", message=FAILED, replicas=(B,))
    assert failing.start_failure == "num_blocks: got 9"
    assert replace(failing, replicas=(A, B)).start_failure == ""
    assert replace(failing, replicas=(replace(A, state="STOPPING"), B)).start_failure == "num_blocks: got 9"


def kinds(before: DeploymentRow | None, after: DeploymentRow) -> list[tuple[str, str]]:
    journal = Journal()
    note_changes(before, after, journal, now_s=15.0)
    return [(event.kind.value, event.replica_id) for event in journal.last(100)]


def test_a_replica_that_runs_says_how_long_its_start_took() -> None:
    journal = Journal()
    running = replace(ROW, replicas=(A, replace(B, state="RUNNING", node_id="k" * 56)))
    note_changes(replace(ROW, replicas=(A, B)), running, journal, now_s=15.4)
    (event,) = journal.last(9)
    assert event.text == f"it runs, 6 s after Serve began to start it, on node {'k' * 12}"


def test_changes_become_events() -> None:
    assert kinds(None, ROW) == []
    assert kinds(ROW, ROW) == []
    assert kinds(ROW, replace(ROW, replicas=(A, B))) == [("starting", "b")]
    assert kinds(replace(ROW, replicas=(A, B)), ROW) == [("died", "b")]
    assert kinds(replace(ROW, replicas=(A, replace(B, state="RUNNING"))), ROW) == [], "its feed tells the rest"
    running = replace(ROW, replicas=(A, replace(B, state="RUNNING", node_id="k" * 56)))
    assert kinds(replace(ROW, replicas=(A, B)), running) == [("starting", "b")]
    assert kinds(ROW, replace(ROW, deployed_s=2.0)) == [("deployed", "")]
    broken = replace(ROW, status="UNHEALTHY", message="no\n  memory")
    assert kinds(ROW, broken) == [("changed", "")]
    assert kinds(ROW, replace(broken, status="DEPLOY_FAILED")) == [("failed", "")]
    assert kinds(broken, broken) == []


async def test_a_silent_controller_is_asked_again_and_nothing_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_watch, "PERIOD_S", 0.001)
    answers: list[Mapping[str, Any] | None] = [details(A, B), None, details(A, B)]
    journal, seen = Journal(), []

    async def ask() -> Mapping[str, Any]:
        seen.append(watch.latest)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise Unavailable("gone")
        return answer

    watch = DeploymentWatch(ask, "shoal", "ReplicaServer", journal)
    task = asyncio.create_task(watch.run())
    await until(lambda: len(seen) > 3)
    task.cancel()
    await asyncio.wait([task])
    row = replace(ROW, replicas=(A, B))
    assert seen[:4] == [None, row, None, row]
    assert [event.kind for event in journal.last(100)] == ["starting"]
