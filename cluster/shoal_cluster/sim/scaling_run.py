"""How an autoscaler did on a load: what it cost, what clients felt, and whether it kept still."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal_cluster.policies.autoscaling_baselines import Scaling
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.policies.pending import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.report import Distribution
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig

RETURN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """A run.

    Attributes:
        num_violations: requests whose first token came later than 2 s plus twice their own prefill, or that were
            refused.
        replica_s: seconds that replicas existed, starting and draining ones included.
        num_returns: changes back to a count that was left within RETURN_S before, through however many others.
    """

    policy: str
    num_requests: int
    num_violations: int
    num_refused: int
    ttft_p50_s: float
    ttft_p99_s: float
    replica_s: float
    num_replicas_peak: int
    num_changes: int
    num_returns: int


def small_replica(plan: ScalingPlan, *, held: bool = True) -> SimConfig:
    """A cluster that begins with one replica of a small accelerator: 2 000 prompt tokens a second in steps of 512,
    40 ms and 0.5 ms a sequence to decode, 25 600 tokens of KV in blocks of 128, 32 sequences at once.

    ``held``: requests wait at the gateway, as the product's do, and go in the order of their due dates; else each is
    placed when it comes.
    """
    prefill = PrefillTime(tokens_per_s=2000.0)
    return SimConfig(
        num_replicas=1,
        cache=CacheConfig(num_blocks=200, block_size=128, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        step_time=StepTime(prefill=prefill, decode_s=0.040, decode_sequence_s=0.0005),
        hold=HoldConfig(prefill=prefill) if held else None,
        scaling=plan,
    )


def run_scaling(config: SimConfig, requests: Sequence[SimRequest]) -> tuple[ScalingReport, SimCluster]:
    """Run ``requests`` under ``config.scaling`` to the last token; the report, and the cluster as it is then."""
    cluster = SimCluster(config)
    return run(cluster, requests), cluster


def run(cluster: SimCluster, requests: Sequence[SimRequest]) -> ScalingReport:
    """Run ``requests`` through a new cluster that scales."""
    for request in requests:
        cluster.arrive(request)
    cluster.loop.run()
    check_conservation(cluster)
    scaling = cluster.config.scaling
    assert scaling is not None
    assert cluster.scaler is not None
    outcomes = cluster.book.outcomes.values()
    ttft_s = Distribution.of([o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None])
    changes = cluster.scaler.changes
    return ScalingReport(
        policy=scaling.policy,
        num_requests=len(outcomes),
        num_violations=sum(not o.is_good for o in outcomes),
        num_refused=sum(o.refusal is not None for o in outcomes),
        ttft_p50_s=ttft_s.p50,
        ttft_p99_s=ttft_s.p99,
        replica_s=cluster.scaler.cost_s,
        num_replicas_peak=max(count for _, count in changes),
        num_changes=len(changes) - 1,
        num_returns=num_returns(changes),
    )


def num_returns(changes: Sequence[tuple[float, int]], within_s: float = RETURN_S) -> int:
    """Changes, of (time, count) pairs, to a count that was left within ``within_s`` before: A to B and back to A, or
    from A by B and C.
    """
    returns = 0
    left_s: dict[int, float] = {}
    for (_, before), (time_s, count) in pairwise(changes):
        left_s[before] = time_s
        returns += time_s - left_s.get(count, -math.inf) <= within_s
    return returns


def capacity_s(cluster: SimCluster, since_s: float, num_replicas: int) -> float | None:
    """Seconds from ``since_s`` until at least ``num_replicas`` served; None if they never did."""
    assert cluster.scaler is not None
    return next(
        (time_s - since_s for time_s, n in cluster.scaler.ready if time_s >= since_s and n >= num_replicas), None
    )


def plan(policy: Scaling, startup_s: float, requests_per_replica: float = 2.0, **settings: float) -> ScalingPlan:
    """From 1 to 100 replicas, as Serve's ``num_replicas: auto`` has it; ``settings`` are ScaleConfig's that differ."""
    config = ScaleConfig(max_replicas=100).tuned(settings)
    return ScalingPlan(config=config, policy=policy, startup_s=startup_s, requests_per_replica=requests_per_replica)
