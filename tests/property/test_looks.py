"""Looks (passes over the queue) decide the same with numpy as natively, and without what the queue remembers of the
last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from fixtures.cluster_views import make_query, make_stats

from shoal_cluster.policies import plan
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest, QueuePlace
from shoal_cluster.policies.route_query import uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.faults import Slow, Stall
from shoal_cluster.sim.run import report, run
from shoal_cluster.sim.workload import SimRequest, poisson, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.stats import DUE_WITHIN_S, ReplicaStats

CONFIG = SimConfig(
    num_replicas=6,
    cache=CacheConfig(num_blocks=120, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


def traffic(seed: int, requests_per_s: float, num_tenants: int) -> list[SimRequest]:
    """Prompts that share prefixes and prompts that share nothing, long and short. Of two tenants one is heavy."""
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
    shares = [9, 1] if num_tenants == 2 else [1] * num_tenants
    return [replace(r, tenant=f"tenant-{rng.choices(range(num_tenants), shares)[0]}") for r in requests]


def outcome(config: SimConfig, requests: list[SimRequest]) -> tuple[str, list[object]]:
    """The report, and what became of each request: where it went, and when."""
    cluster = run(SimCluster(config), requests)
    return report(cluster).to_json(), [cluster.book.outcomes[r.request_id] for r in requests]


@pytest.mark.parametrize(
    ("seed", "requests_per_s", "num_tenants", "changes"),
    [
        (0, 15.0, 1, {}),
        (1, 60.0, 1, {}),  # overload: objectives are lost
        (2, 90.0, 1, {"num_replicas": 24, "weights": RouteWeights(prefill_price=3.3, decode_price=70.0)}),
        (3, 20.0, 1, {"faults": (Stall("replica-0001", 1.0, 4.0), Slow("replica-0000", 0.0, 60.0, 3.0))}),
        (4, 20.0, 3, {}),
        (5, 20.0, 1, {"has_shared_pool": True}),
        (6, 40.0, 1, {"hold": HoldConfig(max_steps_ahead=2.5, max_considered=5)}),
        (7, 30.0, 2, {}),
        (8, 40.0, 2, {"num_gateways": 3}),
    ],
)
def test_the_same_requests_go_to_the_same_replicas_at_the_same_times(
    monkeypatch: pytest.MonkeyPatch, seed: int, requests_per_s: float, num_tenants: int, changes: dict[str, object]
) -> None:
    config = replace(CONFIG, seed=seed, **changes)  # type: ignore[arg-type]
    requests = traffic(seed, requests_per_s, num_tenants)
    natively = outcome(config, requests)
    monkeypatch.setattr(plan, "library", None)
    assert outcome(config, requests) == natively


class Gateway:
    """A view of the replicas and a queue, which plans by numpy or ``forgets`` what it remembers of its last look."""

    def __init__(
        self,
        max_index_entries: int,
        weights: RouteWeights,
        *,
        by_numpy: bool = False,
        forgets: bool = False,
        is_one_of_many: bool = False,
    ) -> None:
        self.view = ClusterView(max_index_entries)
        self.queue = PendingQueue(HoldConfig(max_considered=8), is_one_of_many)
        self._weights = weights
        self._by_numpy = by_numpy
        self._forgets = forgets
        self._rng = Random(1)

    def next(self, now: float) -> Dispatch | None:
        """The request that is sent now, if any; its room at the replica is reserved."""
        if self._forgets:
            self.queue._to_consider.forget()
            for held in self.queue._held.values():
                held.considered = None
        with pytest.MonkeyPatch.context() as patch:
            if self._by_numpy:
                patch.setattr(plan, "library", None)
            sent = self.queue.next(self.view, self._weights, now, self._rng)
        if sent is not None:
            query, matched = sent.pending.query, sent.candidates.matched_by(sent.decision.best)
            size = uncached_blocks(query, matched), uncached_tokens(query, matched)
            self.view.expect(query.request_id, sent.decision.best, query.block_hashes)
            self.view.reserve(query.request_id, sent.decision.best, *size)
        return sent

    def held(self, now: float) -> tuple[list[tuple[QueuePlace, ...]], dict[str, tuple[Wish, ...]]]:
        """What is ahead of each held request and where all of it is to wait; and what other gateways hear of that."""
        return [self.queue.up_to(pending.query.request_id, now, 100) for pending in self.queue], self.queue.wishes()


class News:
    """Random events at gateways: prompts of three kinds, and news of a few replicas."""

    def __init__(self, rng: Random, num_tenants: int) -> None:
        self._rng = rng
        self._num_tenants = num_tenants
        self._num_requests = 0
        self._replica_ids = [f"replica-{number}" for number in range(rng.randint(2, 6))]
        self._draws: dict[Callable[[float], Callable[[Gateway], object]], int] = {
            self._arrival: 30,
            self._update: 45,
            self._promise_kept: 5,
            self._computed: 15,
            self._removal: 3,
            self._disconnection: 2,
            self._stall: 2,
            self._slowing: 2,
            self._snapshot: 6,
            self._restart: 1,
            self._foreign: 5,
        }

    def first(self, now: float) -> list[Callable[[Gateway], object]]:
        """The replicas join."""
        return [self._restart(now, replica_id) for replica_id in self._replica_ids]

    def draw(self, now: float) -> Callable[[Gateway], object]:
        (draw,) = self._rng.choices(list(self._draws), list(self._draws.values()))
        return draw(now)

    def wishes(self, now: float) -> Callable[[Gateway], object]:
        """What other gateways wish of a replica."""
        rng, replica_id = self._rng, self._replica()
        wishes = [
            Wish(
                rank=(rng.choice([-1, 0, 0, 1]), rng.randrange(2), now + rng.choice([0.01, 0.5, 2.0, 5.0])),
                num_blocks=rng.randint(1, 30),
                num_tokens=rng.randint(1, 600),
                num_cached_blocks=rng.randrange(20),
                decode_steps=rng.choice([1, 128]),
                arrival_s=now - rng.random(),
                length_s=3.0,
                is_over=rng.random() < 0.3,
            )
            for _ in range(rng.randrange(4))
        ]
        return lambda gateway: gateway.view.set_wishes(replica_id, wishes)

    def _arrival(self, now: float) -> Callable[[Gateway], object]:
        rng = self._rng
        self._num_requests += 1
        num_tokens = rng.choice([rng.randint(1, 100), rng.randint(200, 600)])
        query = make_query(
            num_tokens,
            request_id=str(self._num_requests),
            block_hashes=tuple(self._blocks(num_tokens)),
            decode_steps=rng.choice([1, 32, 128]),
            excluded=frozenset(rng.choices([(), rng.sample(self._replica_ids, 1), self._replica_ids], [18, 2, 1])[0]),
        )
        tenant, priority = f"tenant-{rng.randrange(self._num_tenants)}", rng.choices([-1, 0, 1], [1, 22, 2])[0]
        pending = PendingRequest(query=query, arrival_s=now, tenant=tenant, priority=priority)
        return lambda gateway: gateway.queue.push(pending)

    def _update(self, now: float) -> Callable[[Gateway], object]:
        replica_id, stats = self._replica(), self._stats() if self._rng.random() < 0.6 else None
        blocks = self._blocks(self._rng.randint(0, 600)) if self._rng.random() < 0.4 else []
        news = (blocks, ()) if self._rng.random() < 0.7 else ((), blocks)
        return lambda gateway: gateway.view.apply_update(replica_id, stats, *news, now)

    def _snapshot(self, now: float) -> Callable[[Gateway], object]:
        replica_id, blocks = self._replica(), self._blocks(self._rng.randint(0, 600))
        stats = self._stats() if self._rng.random() < 0.5 else None

        def snapshot(gateway: Gateway) -> None:
            last = dict(zip(gateway.view.replica_ids, gateway.view.present(now).stats, strict=True))[replica_id]
            gateway.view.apply_snapshot(replica_id, stats or last or self._stats(), blocks, now)

        return snapshot

    def _restart(self, now: float, replica_id: str = "") -> Callable[[Gateway], object]:
        replica_id, stats = replica_id or self._replica(), self._stats()

        def restart(gateway: Gateway) -> None:
            gateway.view.leave(replica_id)
            gateway.view.join(replica_id)
            gateway.view.apply_snapshot(replica_id, stats, (), now)

        return restart

    def _disconnection(self, _: float) -> Callable[[Gateway], object]:
        replica_id = self._replica()
        return lambda gateway: gateway.view.disconnect(replica_id)

    def _stall(self, _: float) -> Callable[[Gateway], object]:
        replica_id, is_stalled = self._replica(), self._rng.random() < 0.3
        return lambda gateway: gateway.view.set_stalled(replica_id, is_stalled)

    def _slowing(self, _: float) -> Callable[[Gateway], object]:
        replica_id, slowness = self._replica(), self._rng.choice([1.0, 1.0, 1.41, 4.0])
        return lambda gateway: gateway.view.set_slowness(replica_id, slowness)

    def _foreign(self, _: float) -> Callable[[Gateway], object]:
        rng = self._rng
        replica_id, promised = self._replica(), (rng.randint(0, 3), rng.randint(0, 30), rng.randint(0, 800))
        return lambda gateway: gateway.view.set_foreign(replica_id, *promised)

    def _promise_kept(self, _: float) -> Callable[[Gateway], object]:
        request_id = self._request()
        return lambda gateway: gateway.view.settle([request_id])

    def _computed(self, _: float) -> Callable[[Gateway], object]:
        request_id = self._request()
        return lambda gateway: gateway.view.computed(request_id)

    def _removal(self, _: float) -> Callable[[Gateway], object]:
        request_id = self._request()
        return lambda gateway: gateway.queue.remove(request_id)

    def _replica(self) -> str:
        return self._rng.choice(self._replica_ids)

    def _request(self) -> str:
        """One of the latest requests: held, sent or gone."""
        return str(self._num_requests - self._rng.randrange(12))

    def _blocks(self, num_tokens: int) -> list[BlockHash]:
        """The blocks of a prompt that begins like others of its kind."""
        kind, num_shared = self._rng.randrange(3), min(num_tokens, 320)
        own = range(self._num_requests * 1000 + 100_000, self._num_requests * 1000 + 100_000 + num_tokens - num_shared)
        return hash_blocks([*range(kind * 1000, kind * 1000 + num_shared), *own], 16)

    def _stats(self) -> ReplicaStats:
        rng = self._rng
        if rng.random() < 0.1:
            return make_stats(num_total_blocks=200, max_num_batched_tokens=512, token_s=1e-4)  # nothing to compute
        num_waiting_tokens = rng.choice([100, 300, 600, 1200, 1500, 4000])
        due = sorted(rng.randint(0, num_waiting_tokens) for _ in DUE_WITHIN_S[1:])
        return make_stats(
            num_total_blocks=200,
            num_free_blocks=rng.choice([200, 60, 20, 5, 0, 0]),
            num_running=rng.randint(0, 8),
            num_waiting=rng.choice([0, 0, 2]),
            num_waiting_tokens=num_waiting_tokens,
            max_num_batched_tokens=512,
            step_s=0.03,
            token_s=rng.choice([1e-4, 1e-4, 2e-4]),
            due_tokens=(*due, num_waiting_tokens),
            draining=rng.random() < 0.01,
            by_due=rng.random() < 0.8,
        )


@pytest.mark.parametrize("num_tenants", [1, 2, 3])
@pytest.mark.parametrize(("max_index_entries", "is_one_of_many"), [(16, False), (4096, False), (4096, True)])
def test_a_queue_decides_as_one_that_plans_by_numpy_or_remembers_nothing(
    num_tenants: int, max_index_entries: int, is_one_of_many: bool
) -> None:
    """Other gateways' wishes come in between, if there are any, and these hear the same wishes from it."""
    counts: Counter[str] = Counter()
    for seed in range(40):
        rng, now = Random(seed), 100.0
        prices = {"prefill_price": rng.choice([1.0, 6.0]), "decode_price": rng.choice([0.0, 70.0, 512.0])}
        ways: list[dict[str, bool]] = [{}, {"by_numpy": True}, {"forgets": True}]
        gateways = [
            Gateway(max_index_entries, RouteWeights(**prices), is_one_of_many=is_one_of_many, **way) for way in ways
        ]
        news = News(rng, num_tenants)
        for join in news.first(now):
            for gateway in gateways:
                join(gateway)
        for _ in range(45):
            now += rng.choice([0.0, 0.001, 0.005, 0.01, 0.03]) if rng.random() < 0.97 else rng.random() * 1.2
            event = news.wishes(now) if is_one_of_many and rng.random() < 0.3 else news.draw(now)
            for gateway in gateways:
                event(gateway)
            sent = True
            while sent is not None:
                sent, *others = (gateway.next(now) for gateway in gateways)
                assert [decided(other) for other in others] == [decided(sent)] * 2, (seed, now)
                counts["sent"] += sent is not None
            (places, wishes), *others = (gateway.held(now) for gateway in gateways)
            assert others == [(places, wishes)] * 2
            counts["held"] += len(places)
            counts["wished"] += len(wishes)
            gateways[0].view.check_invariants()
    assert counts["sent"] > 100
    assert counts["held"] > 1000
    assert (counts["wished"] > 100) == is_one_of_many


def decided(sent: Dispatch | None) -> object:
    if sent is None:
        return None
    assert sent.look is not None
    assert sent.look.replay() == (sent.look.assignments, True)
    return sent.pending.query, sent.decision.best, sent.due_s, sent.yields, sent.look.assignments
