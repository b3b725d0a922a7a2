"""Autoscaling in simulated time: periodic decisions, replicas that take time to start, and replicas that drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal_cluster.policies.autoscaling import desired_replicas
from shoal_cluster.policies.autoscaling_baselines import Past, Scaling, hpa, kpa, serve_default, threshold
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.sim.config import ScalingPlan
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.replica import SimReplica

Decide = Callable[[ScaleView, Any, ScaleConfig, float], tuple[int, Any]]


class SimScaler:
    """Runs the plan's policy every ``interval_s`` until ``is_over``.

    Args:
        replicas: the live replicas, by id; the cluster's own mapping, not a copy.
        look: returns what the gateways know of the replicas, and the demand they have seen.
        start: adds a replica that serves at once.
        resume: resumes elsewhere the requests that a replica has cut off.

    Attributes:
        changes: (time, target) at the start and at every change of the target.
        cost_s: replica-seconds up to the last decision, starting and draining replicas included.
        ready: (time, number serving) at the start and whenever a new replica begins to serve.
    """

    def __init__(
        self,
        plan: ScalingPlan,
        num_replicas: int,
        loop: EventLoop,
        replicas: Mapping[str, SimReplica],
        look: Callable[[], tuple[tuple[ReplicaView, ...], Demand]],
        start: Callable[[], object],
        resume: Callable[[list[str]], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.num_target = num_replicas
        self.changes = [(loop.now, num_replicas)]
        self.cost_s = 0.0
        self.ready: list[tuple[float, int]] = [(loop.now, num_replicas)]
        self._plan = plan
        self._loop = loop
        self._replicas = replicas
        self._look = look
        self._start = start
        self._resume = resume
        self._is_over = is_over
        self.decide, self._state = _policy(plan)
        self._num_starting = 0
        loop.after(plan.interval_s, self._turn)

    def _turn(self) -> None:
        plan, now = self._plan, self._loop.now
        if self._is_over():
            return
        self.cost_s += plan.interval_s * (len(self._replicas) + self._num_starting)
        rows, demand = self._look()
        serving = [r for r in self._replicas.values() if not r.draining]
        names = {r.replica_id for r in serving}
        view = ScaleView(
            replicas=tuple(row for row in rows if row.replica_id in names), num_target=self.num_target, demand=demand
        )
        count, self._state = self.decide(view, self._state, plan.config, now)
        if count != self.num_target:
            self.num_target = count
            self.changes.append((now, count))
        for _ in range(count - len(serving) - self._num_starting):
            self._num_starting += 1
            self._loop.after(plan.startup_s, self._finish_starting)
        by_load = sorted(serving, key=lambda r: (r.scheduler.stats(now).num_allocated_blocks, r.replica_id))
        for replica in by_load[: max(0, len(serving) - count)]:
            self._drain(replica)
        self._loop.after(plan.interval_s, self._turn)

    def _drain(self, replica: SimReplica) -> None:
        replica.drain()
        self._loop.after(self._plan.drain_timeout_s, lambda: replica.cut(self._resume))

    def _finish_starting(self) -> None:
        self._num_starting -= 1
        if self._is_over():  # there is nothing left to serve
            return
        num_serving = sum(not r.draining for r in self._replicas.values())
        if num_serving < self.num_target:
            self._start()
            self.ready.append((self._loop.now, num_serving + 1))


def _policy(plan: ScalingPlan) -> tuple[Decide, Any]:
    """The policy of a plan, and its initial state."""
    policy: Scaling = plan.policy
    per_replica = plan.requests_per_replica
    if policy == "shoal":

        def decide(view: ScaleView, state: ScaleState, config: ScaleConfig, now: float) -> tuple[int, ScaleState]:
            decision = desired_replicas(view, state, config, now)
            return decision.num_replicas, decision.state

        return decide, ScaleState()
    if policy == "serve":
        return lambda view, past, config, now: serve_default(view, past, config, now, per_replica), Past()
    if policy == "kpa":
        return lambda view, past, config, now: kpa(view, past, config, now, per_replica), Past()
    return (hpa if policy == "hpa" else threshold), Past()
