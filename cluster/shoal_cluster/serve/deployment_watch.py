"""What Serve says of the replicas' deployment: how many are wanted, which start, run and stop, and what went wrong.

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
ANSWER_TIMEOUT_S = 10.0
START_FAILURES = ("REPLICA_STARTUP_FAILED", "DEPLOYMENT_ACTOR_FAILED")
OUR_ERROR = re.compile(r"^shoal_replica\.errors\.\w+: ")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReplica:
    """A replica's life as Serve sees it. ``state`` is Serve's word: STARTING, RUNNING, STOPPING and others."""

    replica_id: str
    state: str
    node_id: str
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """The deployment of replicas. Owner: Serve's controller; up to ``PERIOD_S`` old.

    Attributes:
        num_wanted: replicas that the autoscaler has asked for last.
        status: Serve's word: HEALTHY, UPDATING, UPSCALING, UNHEALTHY and others.
        trigger: Serve's word for what brought that about.
        message: what Serve says of it, empty when all is well.
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
        """Why no replica comes up, once so many starts in a row have failed that Serve says so; else empty, and while
        a replica runs: Serve says it of a failing scale-up too, which takes nothing from those that are there.

        Of a version that has never run Serve then starts no more, until it is deployed anew or more replicas are
        wanted; of another it goes on trying.
        """
        if self.trigger not in START_FAILURES or self.num_in("RUNNING"):
            return ""
        return error_line([self.message])

    def num_in(self, *states: str) -> int:
        """Replicas in any of ``states``."""
        return sum(replica.state in states for replica in self.replicas)


def read_deployment(details: Mapping[str, Any], application: str, deployment: str) -> DeploymentRow | None:
    """One deployment out of Serve's instance details; None while it is not there."""
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


def error_line(messages: Iterable[str]) -> str:
    """The error itself, without the tracebacks around it: ours if there is one, else the last line."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if OUR_ERROR.match(line)]
    return OUR_ERROR.sub("", (ours or lines or ["no reason given"])[-1])


def _word(value: str) -> str:
    """The value of Serve's enums, which are strings; ``str()`` would name the enum."""
    return str.__str__(value)


def note_changes(before: DeploymentRow | None, after: DeploymentRow, journal: Journal, now_s: float) -> None:
    """Write into ``journal`` what is new in ``after``, which is of ``now_s`` (Unix time). Of what a first look finds,
    starts and trouble are news.
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
        # A replica that is replaced, after a drain too, makes Serve say UNHEALTHY for a while: that is no failure.
        kind = EventKind.FAILED if after.status == "DEPLOY_FAILED" else EventKind.CHANGED
        journal.note(kind, f"Serve says {after.status}: {' '.join(after.message.split())}")


class DeploymentWatch:
    """Asks every ``PERIOD_S``; ``latest`` is the last answer, None before the first.

    Args:
        ask: Serve's instance details. Raises Unavailable when they cannot be had now.
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
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    self.latest = read_deployment(await self._ask(), *self._names)
            except (Unavailable, TimeoutError) as error:
                logger.warning("the deployment cannot be watched now: %s", error)
                self.latest = None
            if self.latest is not None:
                note_changes(self._noted, self.latest, self._journal, time.time())
                self._noted = self.latest
            await asyncio.sleep(PERIOD_S)
