"""Evaluates an autoscaler on a load: its cost, the latency for clients, and its stability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal_cluster.policies.autoscaling_baselines import Scaling
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.report import Distribution
from shoal_cluster.sim.run import run
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig

RETURN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """The results of a run.

    Attributes:
        num_violations: requests that were refused, or whose first token came later than the run's objective allows
            (2 s plus twice their own prefill by default).
        replica_s: seconds that replicas existed, starting and draining ones included.
        num_returns: changes back to a count that was left at most RETURN_S earlier, however many counts lay between.
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
    """A cluster that starts with one replica on a small accelerator: prefill at 2 000 tokens/s in steps of 512 tokens,
    decode steps of 40 ms plus 0.5 ms per sequence, 25 600 tokens of KV cache in blocks of 128, 32 sequences at once.

    ``held``: requests wait at the gateway, as in a live cluster, and are sent by due date; else each is placed on
    arrival.
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
    """Run ``requests`` under ``config.scaling`` to the last token; return the report and the cluster."""
    cluster = run(SimCluster(config), requests, is_watched=True)
    return scaling_report(cluster), cluster


def scaling_report(cluster: SimCluster) -> ScalingReport:
    """The report of a finished run with autoscaling."""
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
    """How many of the (time, count) ``changes`` go back to a count that was left at most ``within_s`` earlier, directly
    (A, B, A) or through others (A, B, C, A).
    """
    returns = 0
    left_s: dict[int, float] = {}
    for (_, before), (time_s, count) in pairwise(changes):
        left_s[before] = time_s
        returns += time_s - left_s.get(count, -math.inf) <= within_s
    return returns


def plan(policy: Scaling, startup_s: float, requests_per_replica: float = 2.0, **settings: float) -> ScalingPlan:
    """A plan for 1 to 100 replicas, as with Serve's ``num_replicas: auto``; ``settings`` override ScaleConfig's."""
    config = ScaleConfig(max_replicas=100).tuned(settings)
    return ScalingPlan(config=config, policy=policy, startup_s=startup_s, requests_per_replica=requests_per_replica)
