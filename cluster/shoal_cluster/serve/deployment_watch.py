"""What Serve reports about the replicas: how many are wanted, which start, run and stop, and what went wrong.

Routers are told of running replicas only; starts, failed starts and stops are known to Serve's controller.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_cluster.serve.journal import EventKind, Journal
from shoal_replica.errors import Unavailable

PERIOD_S = 2.0
CONTROLLER_TIMEOUT_S = 10.0  # for an answer of Serve's controller
START_FAILURES = ("REPLICA_STARTUP_FAILED", "DEPLOYMENT_ACTOR_FAILED")
NEVER_RAN = "The actor never ran"  # what Ray says where a node was lost before the actor began: the next one may
OUR_ERROR = re.compile(r"^shoal_replica\.errors\.\w+: ")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReplica:
    """A replica as Serve sees it. ``state`` is Serve's word: STARTING, RUNNING, STOPPING and others."""

    replica_id: str
    state: str
    node_id: str
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """The deployment of replicas. Owner: Serve's controller; as of its last answer, which it is asked for
    every ``PERIOD_S``.

    Attributes:
        num_wanted: replicas that the autoscaler last asked for.
        status: Serve's word: HEALTHY, UPDATING, UPSCALING, UNHEALTHY and others.
        trigger: Serve's word for what caused that status.
        message: Serve's explanation of it, empty when all is well.
        deployed_s: Unix time of the application's last deployment.
    """

    num_wanted: int
    status: str
    message: str
    deployed_s: float
    replicas: tuple[ServeReplica, ...]
    trigger: str = ""

    @property
    def start_failure(self) -> str:
        """Why no replica comes up. Empty until so many starts in a row have failed that Serve reports it, and while a
        replica runs: Serve reports a failing scale-up too, which does not affect the replicas that are there. Nor is it
        a reason that a node was lost meanwhile.

        Of a version that has never run, Serve then starts no more replicas until something else is deployed or more
        are wanted; of any other it keeps trying.
        """
        if self.trigger not in START_FAILURES or self.num_in("RUNNING"):
            return ""
        line = last_error([self.message])
        return "" if line.startswith(NEVER_RAN) else line

    def num_in(self, *states: str) -> int:
        """Number of replicas in any of ``states``."""
        return sum(replica.state in states for replica in self.replicas)


def read_deployment(details: Mapping[str, Any], application: str, deployment: str) -> DeploymentRow | None:
    """Read one deployment out of Serve's instance details; None while it is not there."""
    found = details["applications"].get(application)
    if found is None or deployment not in found["deployments"]:
        return None
    fields = found["deployments"][deployment]
    return DeploymentRow(
        num_wanted=fields["target_num_replicas"],
        status=_word(fields["status"]),
        trigger=_word(fields["status_trigger"]),
        message=fields["message"],
        deployed_s=found["last_deployed_time_s"],
        replicas=tuple(
            ServeReplica(
                replica_id=replica["replica_id"],
                state=_word(replica["state"]),
                node_id=replica.get("node_id") or "",
                started_s=replica["start_time_s"],
            )
            for replica in fields["replicas"]
        ),
    )


def last_error(messages: Iterable[str]) -> str:
    """The error without the tracebacks around it: the last one of ours if there is any, else the last line."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if OUR_ERROR.match(line)]
    return OUR_ERROR.sub("", (ours or lines or ["no reason given"])[-1])


def _word(value: str) -> str:
    """The value of one of Serve's string enums; ``str()`` would include the enum's name."""
    return str.__str__(value)


def note_changes(before: DeploymentRow | None, after: DeploymentRow, journal: Journal, now_s: float) -> None:
    """Write into ``journal`` what is new in ``after``, which was read at ``now_s`` (Unix time). Of what is found the
    first time, only starts and trouble are news.
    """
    known = {r.replica_id: r for r in before.replicas} if before is not None else {}
    now = {r.replica_id: r for r in after.replicas}
    if before is not None and after.deployed_s != before.deployed_s:
        journal.note(EventKind.DEPLOYED, "a configuration was applied")
    for replica_id, replica in now.items():
        if replica.state == "STARTING" and replica_id not in known:
            journal.note(EventKind.STARTING, "Serve has begun to start it", replica_id=replica_id)
        elif replica.state == "RUNNING" and replica_id in known and known[replica_id].state == "STARTING":
            took = f"it runs, {max(0.0, now_s - replica.started_s):.0f} s after Serve began to start it"
            where = f", on node {replica.node_id[:12]}" if replica.node_id else ""
            journal.note(EventKind.STARTING, took + where, replica_id=replica_id)
    for replica_id, replica in known.items():
        if replica.state == "STARTING" and replica_id not in now:
            journal.note(EventKind.DIED, "it never became ready", replica_id=replica_id)
    trouble = after.status in ("UNHEALTHY", "DEPLOY_FAILED") and after.message
    if trouble and (before is None or before.message != after.message):
        # Replacing a replica, even after a drain, makes Serve say UNHEALTHY for a while: that is no failure.
        kind = EventKind.FAILED if after.status == "DEPLOY_FAILED" else EventKind.CHANGED
        journal.note(kind, f"Serve says {after.status}: {' '.join(after.message.split())}")


class DeploymentWatch:
    """Asks Serve every ``PERIOD_S``; ``latest`` is its last answer, None before the first and while it does not answer.

    Args:
        ask: returns Serve's instance details. Raises Unavailable if they cannot be had now.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Mapping[str, Any]]], application: str, deployment: str, journal: Journal
    ) -> None:
        self._ask = ask
        self._names = (application, deployment)
        self._journal = journal
        self.latest: DeploymentRow | None = None
        self._noted: DeploymentRow | None = None

    def start_failure(self) -> str:
        """See DeploymentRow; empty while nothing is known."""
        return self.latest.start_failure if self.latest is not None else ""

    async def run(self) -> None:
        """Follow the deployment until cancelled. A controller that is silent or restarts is asked again."""
        while True:
            try:
                async with asyncio.timeout(CONTROLLER_TIMEOUT_S):
                    self.latest = read_deployment(await self._ask(), *self._names)
            except (Unavailable, TimeoutError) as error:
                logger.warning("the deployment cannot be watched now: %s", error)
                self.latest = None
            if self.latest is not None:
                note_changes(self._noted, self.latest, self._journal, time.time())
                self._noted = self.latest
            await asyncio.sleep(PERIOD_S)
