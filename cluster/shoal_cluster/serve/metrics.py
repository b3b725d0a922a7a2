"""The cluster's state in Prometheus' words, computed from the gateway's rows when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_cluster.serve.call import ClusterRow
from shoal_cluster.serve.ledger import BlockLedger, sum_blocks
from shoal_replica.stats import ReplicaStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (0.5, 0.9, 0.99)

_LEDGER: dict[str, tuple[str, Callable[[BlockLedger | ReplicaStats], float]]] = {
    "blocks_allocated": ("KV blocks held by running sequences", lambda ledger: ledger.num_allocated_blocks),
    "blocks_cached": ("Free KV blocks that still hold a prefix", lambda ledger: ledger.num_cached_blocks),
    "blocks_free": ("KV blocks no sequence holds", lambda ledger: ledger.num_free_blocks),
    "blocks_total": ("KV blocks of the pool", lambda ledger: ledger.num_total_blocks),
    "block_utilization": ("Share of KV blocks held by running sequences", lambda ledger: ledger.utilization),
}
_REPLICA_GAUGES: dict[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "sequences_running": ("Sequences running", lambda stats: stats.num_running),
    "sequences_waiting": ("Sequences waiting", lambda stats: stats.num_waiting),
    "waiting_tokens": ("Prompt tokens not computed yet", lambda stats: stats.num_waiting_tokens),
    "step_seconds": ("Length of the last step", lambda stats: stats.step_s),
    "draining": ("1 when it takes no new requests", lambda stats: stats.draining),
}
_REPLICA_COUNTERS: dict[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "steps": ("Steps run", lambda stats: stats.num_steps),
    "prompt_tokens": ("Prompt tokens taken in", lambda stats: stats.num_prompt_tokens),
    "cached_tokens": ("Prompt tokens found in the prefix cache", lambda stats: stats.num_cached_tokens),
    "generated_tokens": ("Tokens generated", lambda stats: stats.num_generated_tokens),
    "finished": ("Requests finished", lambda stats: stats.num_finished),
    "preemptions": ("Sequences preempted", lambda stats: stats.num_preemptions),
    "refused": ("Requests refused", lambda stats: stats.num_refused),
}
_GATEWAY_COUNTERS: dict[str, tuple[str, Callable[[ClusterRow], float]]] = {
    "requests": ("Requests taken in", lambda cluster: cluster.num_requests),
    "requests_shed": ("Requests refused for want of room", lambda cluster: cluster.num_shed),
    "requests_failed": ("Requests failed", lambda cluster: cluster.num_failed),
    "resumes": ("Streams that went on at another replica", lambda cluster: cluster.num_resumes),
}


def render_metrics(cluster: ClusterRow) -> bytes:
    """The text that Prometheus scrapes, in CONTENT_TYPE."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ClusterCollector(cluster))
    return bytes(generate_latest(registry))


class _ClusterCollector(Collector):
    def __init__(self, cluster: ClusterRow) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        yield from self._of_gateway()
        yield from self._of_replicas()

    def describe(self) -> Iterable[Metric]:
        return ()

    def _of_gateway(self) -> Iterator[Metric]:
        cluster = self._cluster
        ledger = sum_blocks(cluster.replicas)
        for name, (words, amount) in _LEDGER.items():
            yield GaugeMetricFamily(f"shoal_cluster_{name}", f"{words}, over the cluster", amount(ledger))
        for name, (words, total) in _GATEWAY_COUNTERS.items():
            yield CounterMetricFamily(f"shoal_gateway_{name}", words, total(cluster))
        yield GaugeMetricFamily("shoal_gateway_requests_active", "Requests in progress", cluster.num_active)
        ttft = GaugeMetricFamily(
            "shoal_gateway_recent_ttft_seconds", "Times to first token of recent requests", labels=["quantile"]
        )
        if times := sorted(cluster.recent_ttft_s):
            for quantile in QUANTILES:
                ttft.add_metric([str(quantile)], times[min(len(times) - 1, int(quantile * len(times)))])
        yield ttft

    def _of_replicas(self) -> Iterator[Metric]:
        rows = self._cluster.replicas
        labels = ["replica_id"]
        connected = GaugeMetricFamily("shoal_replica_connected", "1 when its feed is open", labels=labels)
        age = GaugeMetricFamily("shoal_replica_stats_age_seconds", "Age of its stats", labels=labels)
        reserved = GaugeMetricFamily(
            "shoal_replica_blocks_reserved", "KV blocks promised to requests that its stats do not show", labels=labels
        )
        for row in rows:
            connected.add_metric([row.replica_id], row.connected)
            age.add_metric([row.replica_id], row.age_s)
            reserved.add_metric([row.replica_id], row.num_reserved_blocks)
        yield from (connected, age, reserved)
        spoken = [(row.replica_id, row.stats) for row in rows if row.stats is not None]
        for name, (words, amount) in [*_LEDGER.items(), *_REPLICA_GAUGES.items()]:
            gauge = GaugeMetricFamily(f"shoal_replica_{name}", words, labels=labels)
            for replica_id, stats in spoken:
                gauge.add_metric([replica_id], amount(stats))
            yield gauge
        for name, (words, amount) in _REPLICA_COUNTERS.items():
            counter = CounterMetricFamily(f"shoal_replica_{name}", words, labels=labels)
            for replica_id, stats in spoken:
                counter.add_metric([replica_id], amount(stats))
            yield counter
