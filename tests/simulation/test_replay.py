"""Every decision of a run, replayed from its record: which request goes where, which are held, how many replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from fixtures.memory_store import MemoryStore

from shoal_cluster.policies import pending
from shoal_cluster.policies.autoscaling import desired_replicas, replay, scale_record
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.autoscaling_view import ScaleRecord, ScaleView
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.considered import Considered
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.look import Basis, Look, LookResult, look
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.routing import RouteWeights, route
from shoal_cluster.serve.scaling_board import ScalingBoard
from shoal_cluster.sim import scaler
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.run import simulate
from shoal_cluster.sim.workload import SimRequest, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    hold=HoldConfig(),
)


def chats(requests_per_s: float, num_requests: int) -> list[SimRequest]:
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=16,
        num_prefix_tokens=1024,
        num_own_tokens=100,
        num_output_tokens=20,
        seed=1,
    )


class NotedPlan(Plan):
    """A plan that remembers what it was made of."""

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        super().__init__(snapshot, weights, max_steps_ahead)
        self.snapshot, self.max_steps_ahead = snapshot, max_steps_ahead


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_every_look_of_a_run_decides_the_same_again(monkeypatch: pytest.MonkeyPatch, num_gateways: int) -> None:
    """Also the looks that send nothing. A record must hold everything that the look depends on."""
    counts: Counter[str] = Counter()
    sent_by: list[tuple[str, Look]] = []

    def spy(
        plan: Plan,
        considered: Iterable[Considered],
        plans_all: bool,
        basis_of: Callable[[int], Basis],
        *,
        at_once: bool,
    ) -> LookResult:
        bases: dict[int, Basis] = {}

        def noted(number: int) -> Basis:
            bases[number] = basis_of(number)
            return bases[number]

        assert isinstance(plan, NotedPlan)
        looked = look(plan, considered, plans_all, noted, at_once=at_once)
        seen, assignments, sent = tuple(looked.considered), tuple(looked.assignments), looked.sent
        record = Look(
            plan.snapshot, plan.weights, plan.max_steps_ahead, plan.patience, plans_all, seen, bases, assignments
        )
        assert record.replay() == (assignments, sent is not None)
        counts["held"] += len(assignments) - (sent is not None)
        counts["sent"] += sent is not None
        return looked

    real_next = PendingQueue.next

    def noting_next(queue: PendingQueue, *arguments: Any) -> Dispatch | None:
        dispatch = real_next(queue, *arguments)
        if dispatch is not None:
            (assignments, is_sent), query = dispatch.look.replay(), dispatch.pending.query
            assert (assignments, is_sent) == (dispatch.look.assignments, True)
            assert dispatch.look.considered[len(assignments) - 1].query is query
            assert dispatch.look.snapshot.replica_ids[assignments[-1][0]] == dispatch.decision.best
            again = route(query, dispatch.candidates, RouteWeights(), Random(dispatch.seed))
            assert again == dispatch.decision
            assert again.ranked[0] == dispatch.decision.best
            sent_by.append((query.request_id, dispatch.look))
        return dispatch

    monkeypatch.setattr(pending, "look", spy)
    monkeypatch.setattr(pending, "Plan", NotedPlan)
    monkeypatch.setattr(PendingQueue, "next", noting_next)
    report = simulate(replace(CONFIG, num_gateways=num_gateways), chats(16.0, 200))
    assert report.num_finished == 200
    assert len({request_id for request_id, _ in sent_by}) == counts["sent"] == 200
    assert counts["held"] > 0
    assert any(len(record.considered) > 1 for _, record in sent_by)


def test_every_scaling_decision_of_a_run_is_taken_again_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a round trip through the board, which keeps records as bytes."""
    board = ScalingBoard("app", MemoryStore())
    changes: Counter[str] = Counter()

    def noting(view: ScaleView, state: ScaleState, config: ScaleConfig, now: float) -> Any:
        decision = desired_replicas(view, state, config, now)
        record = replace(scale_record(view, state, config, now, decision), seq=1)
        board.put_record(record)
        (kept,) = board.records(0, 1)
        again = replay(kept)
        assert (again.num_replicas, again.reason, again.terms) == (
            decision.num_replicas,
            decision.reason,
            decision.terms,
        )
        assert replay(record) == decision
        changes[decision.reason.partition(":")[0]] += 1
        return decision

    monkeypatch.setattr(scaler, "desired_replicas", noting)
    burst = chats(30.0, 300)
    quiet = [replace(r, request_id=f"late-{r.request_id}", arrival_s=r.arrival_s * 20 + 30) for r in burst[:40]]
    settings = ScaleConfig(max_replicas=6, target_utilization=0.6, downscale_delay_s=10.0)
    plan = ScalingPlan(config=settings, interval_s=1.0, startup_s=3.0)
    report = simulate(replace(CONFIG, num_replicas=1, scaling=plan), [*burst, *quiet])
    assert report.num_finished == 340
    assert changes["up"] >= 1
    assert changes["down"] >= 1
    assert changes["hold"] > 10


def test_a_record_without_its_state_says_so() -> None:
    view = ScaleView(replicas=(), num_target=1)
    decision = desired_replicas(view, ScaleState(), ScaleConfig(max_replicas=2), 0.0)
    record: ScaleRecord = replace(
        scale_record(view, ScaleState(), ScaleConfig(max_replicas=2), 0.0, decision), state=None
    )
    with pytest.raises(ValueError, match="state"):
        replay(record)
