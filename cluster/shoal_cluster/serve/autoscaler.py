"""Adapter from Serve to ``desired_replicas()``: a policy class that runs in the Serve controller's control loop."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ray.serve.config import AutoscalingContext

from shoal_cluster.policies.autoscaling import desired_replicas, scale_record
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_observe import MAX_AGE_S
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.autoscaling_view import ScaleRecord, ScaleView
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.serve.demand_sum import DemandSum
from shoal_cluster.serve.freshness import Freshness
from shoal_cluster.serve.metrics.autoscaler import AutoscalerMetrics
from shoal_cluster.serve.metrics.ray_export import RayExport
from shoal_cluster.serve.ray_store import RayStore
from shoal_cluster.serve.recorded_stats import LEDGER_FIELDS
from shoal_cluster.serve.scaling_board import GatewayReport, ScalingBoard, Tuning
from shoal_cluster.serve.scaling_link import BoardLink
from shoal_replica.stats import ReplicaStats

MAX_REPORT_AGE_S = 5.0  # reports come once a second; that of a gateway that is gone must not count for long
COMPLAINT_S = 60.0  # between two reports of errors

KINDS: dict[str, type[float]] = {"busy_s": float, "draining": bool}
"""Of what replicas record, which Serve carries as floats; the others are integers."""

logger = logging.getLogger("ray.serve")


class BlockScaling:
    """Callable policy. ``settings`` is a ScaleConfig as builtins, in force until a gateway is known to have others.
    Until one reports, they start replicas, but stop none. ``build_id`` only tells policies apart.
    """

    def __init__(self, settings: dict[str, Any], build_id: str = "") -> None:
        self._base = msgspec.convert(settings, ScaleConfig)
        self._is_told = False
        self._state = ScaleState()
        self._link: BoardLink | None = None
        self._demand = DemandSum()
        self._metrics = AutoscalerMetrics()
        self._export = RayExport()
        self._freshness = Freshness(MAX_REPORT_AGE_S)
        self._replica_freshness = Freshness(MAX_AGE_S)
        self._complained_s = -math.inf

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be: as many as now if that cannot be said. Serve asks for all applications in
        one loop, in which an error would stop the others' updates, too.
        """
        try:
            return self._desired(context), {}
        except Exception:
            if time.monotonic() - self._complained_s >= COMPLAINT_S:
                self._complained_s = time.monotonic()
                logger.exception("the autoscaler holds the number of replicas: it cannot decide")
            return context.target_num_replicas, {}

    def _desired(self, context: AutoscalingContext) -> int:
        link = self._meet(context)
        inbox = link.inbox
        if inbox is None:  # bounds may have been tuned: the deployment's own must not stop replicas meanwhile
            return int(context.target_num_replicas)
        now = time.time()
        fresh = self._freshness.look({r.gateway_id: r.time_s for r in inbox.reports}, now, time.monotonic())
        reports = [r for r in inbox.reports if r.gateway_id in fresh]
        self._is_told |= bool(reports)
        config = self._config(context, reports or inbox.reports, inbox.tuning)
        reserved = Counter[str]()
        for report in reports:
            reserved.update(report.reserved_tokens)
        rows = [_row(context, i, reserved[i.unique_id]) for i in context.running_replicas]
        demand = self._demand.take({r.gateway_id: r.demand for r in reports})
        is_whole = bool(reports) and len(reports) >= max(r.num_gateways for r in reports)
        view = ScaleView(
            replicas=self._aged(rows, now),
            num_target=context.target_num_replicas,
            demand=demand if is_whole else None,
            partial_demand=None if is_whole else demand,
        )
        before = self._state
        decision = desired_replicas(view, before, config, now)
        self._state = decision.state
        self._tell(scale_record(view, before, config, now, decision))
        self._metrics.take(view.num_target, decision.num_replicas, len(view.replicas))
        self._export.publish_if_due(self._metrics.points, time.monotonic())
        return decision.num_replicas

    def _meet(self, context: AutoscalingContext) -> BoardLink:
        """The link to the scaling board; it ends with this policy."""
        if self._link is None:
            self._link = BoardLink(ScalingBoard(context.app_name or "", RayStore()))
            weakref.finalize(self, self._link.stop)
        return self._link

    def _aged(self, rows: list[ReplicaView], now: float) -> tuple[ReplicaView, ...]:
        """With ages. A replica's host may have another time than this one: it reports as long as its clock goes on."""
        written_s = {row.replica_id: row.stats.time_s for row in rows if row.stats is not None}
        fresh = self._replica_freshness.look(written_s, now, time.monotonic())
        aged: list[ReplicaView] = []
        for row in rows:
            age_s = 0.0 if row.stats is None else now - row.stats.time_s
            limits = (0.0, MAX_AGE_S) if row.replica_id in fresh or row.stats is None else (2 * MAX_AGE_S, math.inf)
            aged.append(replace(row, age_s=min(max(age_s, limits[0]), limits[1])))
        return tuple(aged)

    def _config(
        self, context: AutoscalingContext, reports: Sequence[GatewayReport], tuning: Tuning | None
    ) -> ScaleConfig:
        """The settings in force: the gateways', tuned; bounds are scaled if Serve is told to run at part capacity.
        Demand that is old counts no more, but settings stay what they are until a gateway has others.
        """
        if reports:
            self._base = max(reports, key=lambda r: (r.base_since_s, r.time_s)).base
        config, target = self._base, context.target_num_replicas
        if tuning is not None:
            config = tuning.on(config)
        if not self._is_told:
            least, most = max(config.min_replicas, target), max(config.max_replicas, target)
            config = replace(config, min_replicas=least, max_replicas=most)
        share = context.capacity_adjusted_max_replicas / context.config.max_replicas
        if share < 1:
            high = max(1, math.ceil(config.max_replicas * share))
            config = replace(config, min_replicas=math.ceil(config.min_replicas * share), max_replicas=high)
        return config

    def _tell(self, record: ScaleRecord) -> None:
        changes = record.num_after != record.num_before
        assert self._link is not None
        self._link.tell(record, changes=changes)
        if changes:
            logger.info("scaling %d -> %d: %s", record.num_before, record.num_after, record.reason)


def _row(context: AutoscalingContext, replica_id: Any, num_reserved_tokens: int) -> ReplicaView:
    """A replica by the last numbers that it recorded, as of the oldest. Its stats are None until all have arrived."""
    metrics = context.raw_metrics or {}
    values: dict[str, float] = {}
    oldest_s = math.inf
    for name in LEDGER_FIELDS:
        series = metrics.get(name, {}).get(replica_id)
        if not series:
            return ReplicaView(replica_id=replica_id.unique_id, num_reserved_tokens=num_reserved_tokens)
        values[name] = KINDS.get(name, int)(series[-1].value)
        oldest_s = min(oldest_s, series[-1].timestamp)
    return ReplicaView(
        replica_id=replica_id.unique_id,
        stats=ReplicaStats(time_s=oldest_s, **values),  # type: ignore[arg-type]
        connected=True,
        num_reserved_tokens=num_reserved_tokens,
    )
