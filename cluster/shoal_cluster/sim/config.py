"""Configuration of the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.autoscaling_baselines import Scaling
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.baselines import Routing
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.routing import OWN_RULE, RouteWeights
from shoal_cluster.sim.faults import Fault
from shoal_cluster.sim.latency import StepTime
from shoal_replica.config import CacheConfig, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """Autoscaling in a run: a decision every ``interval_s``; a new replica serves after ``startup_s``.

    ``requests_per_replica`` is the target of the policies that count requests. Requests that a draining replica has not
    finished after ``drain_timeout_s`` resume elsewhere.
    """

    config: ScaleConfig
    policy: Scaling = "shoal"
    requests_per_replica: float = 2.0
    interval_s: float = 1.0
    startup_s: float = 30.0
    drain_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """A cluster to simulate.

    Attributes:
        num_gateways: each request arrives at a random one; every gateway has its own view and queue.
        heartbeat_s: how often a replica reports while it is idle or in a long step.
        feed_delay_s: time from the end of a step until the gateway has its tokens and stats.
        has_shared_pool: every replica can use at once, at no cost, what any replica has cached: the upper bound of what
            placement can achieve.
        transfer_s: seconds that a cached block takes from one replica to another, which then need not compute it; None
            if they compute all that they have not cached.
        prefill_share: of the replicas, those that only compute prompts; others go on with their blocks, so
            ``transfer_s`` must be given.
        hold: how gateways hold requests until a replica can start them; None places each request on arrival.
        objective: TTFT up to which a request counts as good, given its actual uncached prefill.
    """

    num_replicas: int
    cache: CacheConfig
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048)
    )
    step_time: StepTime = field(default_factory=StepTime)
    routing: Routing = OWN_RULE
    weights: RouteWeights = field(default_factory=RouteWeights)
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    scaling: ScalingPlan | None = None
    heartbeat_s: float = 1.0
    feed_delay_s: float = 0.005
    objective: LatencyObjective = field(default_factory=LatencyObjective)
    num_gateways: int = 1
    has_shared_pool: bool = False
    transfer_s: float | None = None
    prefill_share: float = 0.0
    hold: HoldConfig | None = None
    faults: tuple[Fault, ...] = ()
    seed: int = 0
