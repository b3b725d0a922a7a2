"""The Serve deployment around one engine."""

from __future__ import annotations

import asyncio
import logging
import os
from time import monotonic
from typing import Any

import ray
from ray import serve

from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.block_fetcher import BlockFetcher
from shoal_cluster.serve.block_map import encode_block_map
from shoal_cluster.serve.block_server import BlockServer
from shoal_cluster.serve.engine_config import engine_config
from shoal_cluster.serve.feed import FeedServer
from shoal_cluster.serve.feed_messages import ADAPTERS, BLOCKS, DRAIN, METRICS, PAST, BlockSource
from shoal_cluster.serve.logs import error_log, set_up_logs
from shoal_cluster.serve.member import member_metadata
from shoal_cluster.serve.metrics.gathered import encode_points
from shoal_cluster.serve.metrics.ray_export import RayExport
from shoal_cluster.serve.metrics.replica import ReplicaMetrics
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.rank_actors import RayRanks
from shoal_cluster.serve.recorded_stats import ledger_metrics
from shoal_cluster.serve.replica_adapters import ReplicaAdapters
from shoal_cluster.serve.replica_past import ReplicaPast
from shoal_cluster.serve.runs import Runs
from shoal_cluster.serve.standstill import end_at_standstill
from shoal_replica.build import build_engine, build_executor, plan_replica
from shoal_replica.config import EngineConfig
from shoal_replica.errors import EngineDead, Unavailable
from shoal_replica.fingerprint import fingerprint
from shoal_replica.reports import StepReport
from shoal_replica.request import Request

LAST_WORDS_S = 0.5  # time for answers and feed messages to leave the process

logger = logging.getLogger(__name__)


class ReplicaServer:
    """Owns an Engine and its feed.

    Requests and tokens travel on the feed. The Serve call of a request that takes longer stays open until its end, so
    that Serve counts it (ongoing requests, draining). Serve's hooks are async, as it would run others in threads beside
    the engine's event loop.
    """

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        replica_id = serve.get_replica_context().replica_id.unique_id
        set_up_logs(config.logs.format, config.logs.level, process="replica", replica_id=replica_id)
        self._model, settings = config.model, config.replica
        resolved: EngineConfig = await asyncio.to_thread(engine_config, config)
        self._report = (await asyncio.to_thread(plan_replica, resolved)).report()
        launcher = None
        if settings.num_ranks > 1:
            launcher = RayRanks(settings, ray.util.get_current_placement_group())
        executor = await asyncio.to_thread(build_executor, resolved, launcher)
        self._engine = build_engine(resolved, executor)
        self._engine.start()
        self._adapters = ReplicaAdapters(self._engine, resolved)
        self._adapters.start()
        shape, cache = resolved.model, resolved.cache
        memory = {"weights": shape.weight_bytes, "kv_blocks": cache.num_blocks * shape.block_bytes(cache.block_size)}
        self._metrics = ReplicaMetrics(replica_id, memory)
        self._export = RayExport()
        self._drain_timeout_s = settings.drain_timeout_s
        self._drain: asyncio.Task[bool] | None = None
        self._feed = FeedServer(
            self._engine,
            answers={
                BLOCKS: lambda _: encode_block_map(self._engine.block_heat()),
                PAST: lambda _: self._past.encoded(),
                METRICS: lambda _: encode_points(self._metrics.own_points()),
                DRAIN: lambda _: self._begin_drain(),
                ADAPTERS: self._adapters.answer,
            },
        )
        host = ray.util.get_node_ip_address() if settings.feed_host == "node" else settings.feed_host
        self._address = await self._feed.start(host)
        block_bytes, name = shape.block_bytes(cache.block_size), await asyncio.to_thread(fingerprint, resolved)
        transfers = settings.kv_transfer and settings.enable_prefix_caching
        self._block_server = BlockServer(self._engine.blocks, name, block_bytes)
        self._blocks_address = await self._block_server.start(host) if transfers else None
        self._fetcher = BlockFetcher(self._engine, name, block_bytes) if transfers else None
        self._runs = Runs(self._engine, self._feed, self._fetcher)
        self._engine.subscribe(self._measure)  # after the feed: tokens go first
        self._past = ReplicaPast(self._engine)
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._leave_when_dead(), name="shoal-replica-watch")
        self._standstill = loop.create_task(end_at_standstill(error_log()), name="shoal-standstill")

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Sent once to every router: the feed's address, the model, a report of what the replica has taken of its host,
        and where it gives its blocks to other replicas, if it does.
        """
        return member_metadata(self._address, self._model, self._report, self._blocks_address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers of the block ledger that the autoscaling policy reads."""
        return ledger_metrics(self._engine.stats())

    async def generate(self, request: Request, gateway_id: str, source: BlockSource | None = None) -> Outcome:
        """Run a request to its end, as ``Runs.call`` does. Cancelling the call frees its blocks.

        Raises:
            EngineDead: the engine has failed; the replica is about to be replaced.
        """
        return await self._runs.call(request, gateway_id, source)

    def _measure(self, report: StepReport) -> None:
        """Called with each report of the engine: after each step, and every ``BEAT_S`` (30 ms) without one."""
        self._metrics.take(report)
        self._export.publish_if_due(lambda: self._metrics.points(report.stats), monotonic())

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._engine.check_health()
        if self._standstill.done():
            raise RuntimeError(f"the replica's event loop is watched no more: {self._standstill}")
        if self._drain is not None and self._drain.done():
            raise Unavailable("drained as an administrator has asked; another replica takes its place")

    async def _leave_when_dead(self) -> None:
        """End the process once the engine has failed. Serve replaces a dead actor at its next check, but an unhealthy
        one only after three failed checks, and lets it drain first."""
        await self._engine.ended()
        try:
            self._engine.check_health()
        except EngineDead as error:
            logger.error("the replica ends: %s", error)
            await self._feed.stop()
            await asyncio.sleep(LAST_WORDS_S)
            os._exit(1)

    def _begin_drain(self) -> bytes:
        if self._drain is None:
            drain = self._engine.drain(self._drain_timeout_s)
            self._drain = asyncio.get_running_loop().create_task(drain, name="shoal-drain")
        return b"draining"

    async def __del__(self) -> None:
        """Serve awaits this after its own drain, which knows only of requests that have been called. The others are
        awaited here, until the replica's time to drain is over: Serve then ends the process.
        """
        if hasattr(self, "_feed"):
            stats = self._engine.stats()
            await self._engine.drain(self._drain_timeout_s)  # idle or not: what comes from now on is refused
            if stats.num_running + stats.num_waiting:
                await asyncio.sleep(LAST_WORDS_S)  # the blocks of those that have moved are fetched
            await self._adapters.close()
            if hasattr(self, "_fetcher") and self._fetcher is not None:
                await self._fetcher.close()
            if hasattr(self, "_block_server"):
                await self._block_server.close()
            await self._engine.stop()
            await self._feed.stop()
