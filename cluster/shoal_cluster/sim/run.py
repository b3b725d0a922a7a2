"""A whole run, from the first arrival to the last token: simulate, check conservation, report."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.parallel import can_part, run_beside
from shoal_cluster.sim.report import Distribution, SimReport
from shoal_cluster.sim.workload import SimRequest

NUM_NEW_OBJECTS = 50_000  # net allocations between garbage collections


def simulate(config: SimConfig, requests: Sequence[SimRequest]) -> SimReport:
    """Run ``requests`` through the cluster to the last token, check conservation, and report.

    Equal arguments give equal reports.
    """
    return report(run(SimCluster(config), requests))


def run(cluster: SimCluster, requests: Sequence[SimRequest], *, is_watched: bool = False) -> SimCluster:
    """Run ``requests`` through an existing cluster until each has ended, and check conservation.

    ``is_watched``: the caller looks at the replicas during the run or afterwards, so they must stay in this process.
    """
    for request in requests:
        cluster.arrive(request)
    with seldom_collected():
        if not is_watched and can_part(cluster):
            run_beside(cluster)
        else:
            cluster.loop.run()
    check_conservation(cluster)
    return cluster


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage rarely during a run: it makes next to no cycles, and objects that exist at its start live on."""
    thresholds = gc.get_threshold()
    gc.collect()  # else garbage of an earlier run would be frozen, too
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def report(cluster: SimCluster) -> SimReport:
    """The report of a finished run."""
    outcomes = cluster.book.outcomes
    everyone = cluster.ended()
    finished = [o for o in outcomes.values() if o.finished_s is not None]
    stats = [r.stats for r in everyone]
    first_s = min((o.arrival_s for o in outcomes.values()), default=0.0)
    last_s = max((o.finished_s or 0.0 for o in finished), default=first_s)
    num_prompt = sum(o.num_prompt_tokens for o in finished)
    num_output = sum(o.num_output_tokens for o in finished)
    busy_s = {r.replica_id: r.busy_s for r in sorted(everyone, key=lambda r: r.replica_id)}
    mean_busy_s = sum(busy_s.values()) / max(1, len(busy_s))
    lives_s = [(r.busy_s, min(last_s, r.ended_s) - r.started_s) for r in everyone]
    shares = [b / life for b, life in lives_s if life > 0]
    return SimReport(
        routing=cluster.config.routing,
        num_requests=len(outcomes),
        num_finished=len(finished),
        num_shed=len(outcomes) - len(finished),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        decisions_per_s=cluster.book.num_decisions / (last_s - first_s) if last_s > first_s else 0.0,
        num_preemptions=sum(s.num_preemptions for s in stats),
        num_resumes=sum(o.num_resumes for o in outcomes.values()),
        num_replicas_peak=cluster.num_peak,
        replica_s=sum(max(0.0, life_s) for _, life_s in lives_s),
        ttft_s=Distribution.of([o.first_token_s - o.arrival_s for o in finished if o.first_token_s is not None]),
        latency_s=Distribution.of([o.finished_s - o.arrival_s for o in finished if o.finished_s is not None]),
        inter_token_s=Distribution.of([o.inter_token_s for o in finished if o.num_output_tokens > 1]),
        goodput=sum(o.is_good for o in finished) / max(1, len(outcomes)),
        hit_rate=sum(o.num_cached_tokens for o in finished) / max(1, num_prompt),
        predicted_hit_rate=sum(o.num_predicted_tokens for o in finished) / max(1, num_prompt),
        host_hit_rate=sum(s.num_host_cached_tokens for s in stats) / max(1, sum(s.num_prompt_tokens for s in stats)),
        transfer_rate=sum(s.num_blocks_taken * s.block_size for s in stats)
        / max(1, sum(s.num_prompt_tokens for s in stats)),
        imbalance=max(busy_s.values()) / mean_busy_s if mean_busy_s else 1.0,
        utilization=sum(shares) / max(1, len(shares)),
        duration_s=last_s - first_s,
        output_tokens_per_s=num_output / (last_s - first_s) if last_s > first_s else 0.0,
        busy_s=busy_s,
    )
