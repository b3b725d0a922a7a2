"""Configuration of the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.autoscaling_baselines import NEVER_FROM_ZERO, Scaling
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.baselines import Routing
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.routing import OWN_RULE, RouteWeights
from shoal_cluster.sim.faults import Fault
from shoal_cluster.sim.latency import StepTime
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """Autoscaling in a run: a decision every ``interval_s``; a new replica serves after ``startup_s``.

    ``requests_per_replica`` is the target of the policies that count requests. Requests that a draining replica has not
    finished after ``drain_timeout_s`` resume elsewhere.

    Raises:
        ConfigError: a value is outside its limits, or ``policy`` could never come back from ``min_replicas``.
    """

    config: ScaleConfig
    policy: Scaling = "shoal"
    requests_per_replica: float = 2.0
    interval_s: float = 1.0
    startup_s: float = 30.0
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("requests_per_replica", "interval_s"):
            _above_0(name, getattr(self, name))
        for name in ("startup_s", "drain_timeout_s"):
            _from_0(name, getattr(self, name))
        if self.policy in NEVER_FROM_ZERO:
            _at_least("min_replicas", self.config.min_replicas, 1, f" under {self.policy}, which never leaves 0")


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

    Raises:
        ConfigError: a value is outside its limits.
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

    def __post_init__(self) -> None:
        may_start = self.scaling is not None and self.scaling.policy not in NEVER_FROM_ZERO
        _at_least("num_replicas", self.num_replicas, 0 if may_start else 1)
        _at_least("num_gateways", self.num_gateways, 1)
        _from_0("feed_delay_s", self.feed_delay_s)
        _above_0("heartbeat_s", self.heartbeat_s)
        if self.transfer_s is not None:
            _above_0("transfer_s", self.transfer_s)
        if not 0 <= self.prefill_share < 1:
            raise ConfigError(f"prefill_share: got {self.prefill_share!r}; must be at least 0 and below 1")
        if self.prefill_share and self.transfer_s is None:
            raise ConfigError(f"prefill_share: got {self.prefill_share!r}; must be 0 without transfer_s")


def _at_least(field_name: str, count: int, least: int, why: str = "") -> None:
    if not isinstance(count, int) or count < least:
        raise ConfigError(f"{field_name}: got {count!r}; must be an integer of at least {least}{why}")


def _from_0(field_name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{field_name}: got {value!r}; must be finite and at least 0")


def _above_0(field_name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{field_name}: got {value!r}; must be finite and above 0")
