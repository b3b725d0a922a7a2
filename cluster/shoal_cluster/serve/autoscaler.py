"""Serve's door to ``desired_replicas()``: a policy class that runs in the Serve controller, ten times a second."""

from __future__ import annotations

import logging
import time
from typing import Any

from ray.serve.config import AutoscalingContext

from shoal_cluster.policies.autoscaling import ScaleConfig, ScaleState, ScaleView, desired_replicas
from shoal_cluster.policies.view import ReplicaView
from shoal_replica.stats import ReplicaStats

LEDGER_FIELDS = (
    "block_size",
    "num_total_blocks",
    "num_free_blocks",
    "num_allocated_blocks",
    "num_cached_blocks",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
)

logger = logging.getLogger("ray.serve")


def ledger_metrics(stats: ReplicaStats) -> dict[str, int]:
    """What a replica records for the policy: Serve carries named numbers."""
    return {name: getattr(stats, name) for name in LEDGER_FIELDS}


class BlockScaling:
    """Callable policy. Keyword arguments are ScaleConfig's fields."""

    def __init__(self, **fields: float) -> None:
        self._config = ScaleConfig(**fields)  # type: ignore[arg-type]
        self._state = ScaleState()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        view = ScaleView(
            replicas=tuple(_row(context, replica_id) for replica_id in context.running_replicas),
            num_target=context.target_num_replicas,
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=context.capacity_adjusted_max_replicas,
        )
        decision = desired_replicas(view, self._state, self._config, time.monotonic())
        self._state = decision.state
        if decision.num_replicas != context.target_num_replicas:
            logger.info("scaling %d -> %d: %s", context.target_num_replicas, decision.num_replicas, decision.reason)
        return decision.num_replicas, {}


def _row(context: AutoscalingContext, replica_id: Any) -> ReplicaView:
    """The last numbers a replica has recorded. Stats are None until every one of them has come."""
    metrics = context.raw_metrics or {}
    values: dict[str, int] = {}
    oldest_s = time.time()
    for name in LEDGER_FIELDS:
        series = metrics.get(name, {}).get(replica_id)
        if not series:
            return ReplicaView(replica_id=replica_id.unique_id)
        values[name] = int(series[-1].value)
        oldest_s = min(oldest_s, series[-1].timestamp)
    return ReplicaView(
        replica_id=replica_id.unique_id,
        stats=ReplicaStats(time_s=oldest_s, **values),  # type: ignore[arg-type]
        age_s=max(0.0, time.time() - oldest_s),
        connected=True,
    )
