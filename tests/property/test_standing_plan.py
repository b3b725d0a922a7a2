"""A plan that is kept from look to look decides as one that is made anew at every look."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from shoal_cluster.policies import look
from shoal_cluster.policies.pending import HoldConfig, PendingQueue
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.standing import StandingPlan
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig, Stall
from shoal_cluster.sim.run import report, run
from shoal_cluster.sim.workload import SimRequest, poisson, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=6,
    cache=CacheConfig(num_blocks=120, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


def traffic(seed: int, requests_per_s: float, num_tenants: int) -> list[SimRequest]:
    """Prompts that share beginnings and prompts that share nothing, long and short."""
    rng = Random(seed)
    chats = shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=140,
        num_groups=9,
        num_prefix_tokens=1500,
        num_own_tokens=200,
        num_output_tokens=25,
        seed=seed,
    )
    others = poisson(
        requests_per_s=requests_per_s / 4, num_requests=30, num_prompt_tokens=700, num_output_tokens=60, seed=seed
    )
    requests = [*chats, *(replace(r, request_id=f"other-{r.request_id}") for r in others)]
    return [replace(r, tenant=f"tenant-{rng.randrange(num_tenants)}") for r in requests]


def outcome(config: SimConfig, requests: list[SimRequest]) -> tuple[str, list[object]]:
    """The report, and where each request went and when."""
    cluster = run(SimCluster(config), requests)
    return report(cluster).to_json(), [cluster.book.outcomes[r.request_id] for r in requests]


@pytest.mark.parametrize(
    ("seed", "requests_per_s", "num_tenants", "changes"),
    [
        (0, 15.0, 1, {}),
        (1, 60.0, 1, {}),  # overload: objectives are lost
        (2, 90.0, 1, {"num_replicas": 24, "weights": RouteWeights(prefill_price=3.3, decode_price=70.0)}),
        (3, 20.0, 1, {"stalls": (Stall("replica-0001", 1.0, 4.0),), "weights": RouteWeights(max_age_s=0.5)}),
        (4, 20.0, 3, {}),
        (5, 20.0, 1, {"has_shared_pool": True}),
        (6, 25.0, 1, {"hold": HoldConfig(max_steps_ahead=2.5, max_considered=5)}),
    ],
)
def test_the_same_requests_go_to_the_same_replicas_at_the_same_times(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    requests_per_s: float,
    num_tenants: int,
    changes: dict[str, object],
) -> None:
    config = replace(CONFIG, seed=seed, **changes)  # type: ignore[arg-type]
    requests = traffic(seed, requests_per_s, num_tenants)
    kept = [0]
    real_keep, real_next = StandingPlan.keep, PendingQueue.next

    def counting_keep(self: StandingPlan, *arguments: object) -> int:
        num_kept = real_keep(self, *arguments)  # type: ignore[arg-type]
        kept[0] += num_kept
        return num_kept

    monkeypatch.setattr(look, "MIN_PRICED", 1)  # prompts are looked up when they are considered, not just before
    monkeypatch.setattr(look, "NUM_PRICES", 1)
    monkeypatch.setattr(StandingPlan, "keep", counting_keep)
    with_plan = outcome(config, requests)
    assert (kept[0] > 30) == (num_tenants == 1 and not config.has_shared_pool)

    def forgetful_next(self: PendingQueue, *arguments: object) -> object:
        self._standing.forget()
        return real_next(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PendingQueue, "next", forgetful_next)
    kept[0] = 0
    assert outcome(config, requests) == with_plan
    assert not kept[0]
