"""What a scaling decision reads, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.replica_view import ReplicaView


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What has arrived at the gateways, summed. Owner: the gateways; about a second old.

    Attributes:
        num_requests, num_prompt_tokens: totals of what arrived, shed or not. They only grow.
        num_shed: total of requests refused for lack of room.
        num_held, num_held_tokens: requests held at the gateways now, until a replica can start them, and their prompt
            tokens.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_shed: int = 0
    num_held: int = 0
    num_held_tokens: int = 0

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            num_requests=self.num_requests + other.num_requests,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_shed=self.num_shed + other.num_shed,
            num_held=self.num_held + other.num_held,
            num_held_tokens=self.num_held_tokens + other.num_held_tokens,
        )

    def __sub__(self, other: Demand) -> Demand:
        return Demand(
            num_requests=self.num_requests - other.num_requests,
            num_prompt_tokens=self.num_prompt_tokens - other.num_prompt_tokens,
            num_shed=self.num_shed - other.num_shed,
            num_held=self.num_held - other.num_held,
            num_held_tokens=self.num_held_tokens - other.num_held_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleView:
    """A snapshot for a decision.

    Attributes:
        replicas: every replica that runs; one whose ``stats`` are None, old or not connected counts as silent.
        num_target: the count asked for so far. The difference to ``replicas`` is starting.
        demand: None while any gateway is silent.
        partial_demand: in that case, the sum over those that report. What they hold counts; their totals do not.
    """

    replicas: tuple[ReplicaView, ...]
    num_target: int
    demand: Demand | None = None
    partial_demand: Demand | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRecord:
    """One decision as it was taken, for display and with all its inputs: ``autoscaling.replay`` decides it again.

    Attributes:
        seq: number of the decision among those that changed the target, from 1; a look that changed nothing has the
            last one's.
        time_s: Unix time.
        num_before, num_after: replicas wanted before and after.
        num_running, num_starting: replicas that ran or were starting.
        reason: one line. It begins with "up", "down" or "hold".
        terms: what the decision weighed, by name.
        replicas: every running replica as the decision saw it.
        config: the settings then.
        demand, partial_demand: what had arrived at the gateways, as in ScaleView.
        state: what was remembered before. None where it was left out: in the APIs' answers, and for looks that changed
            nothing.
    """

    seq: int
    time_s: float
    num_before: int
    num_after: int
    num_running: int
    num_starting: int
    reason: str
    terms: tuple[tuple[str, float], ...]
    replicas: tuple[ReplicaView, ...]
    config: ScaleConfig
    demand: Demand | None = None
    partial_demand: Demand | None = None
    state: ScaleState | None = None
