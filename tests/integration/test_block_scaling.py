"""Serve's policy class: it makes a view of what Serve and the gateways report, and reports what it decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fixtures.cluster_views import make_stats
from fixtures.memory_store import MemoryStore
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from shoal_cluster.policies.autoscaling import replay
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_observe import MAX_AGE_S
from shoal_cluster.policies.autoscaling_view import Demand, ScaleRecord
from shoal_cluster.serve.autoscaler import MAX_REPORT_AGE_S, BlockScaling
from shoal_cluster.serve.recorded_stats import ledger_metrics
from shoal_cluster.serve.scaling_board import GatewayReport, ScalingBoard, Tuning
from shoal_cluster.serve.scaling_link import BoardLink
from shoal_replica.stats import ReplicaStats

pytestmark = pytest.mark.integration  # needs Ray's types, but no cluster
BASE = ScaleConfig(min_replicas=1, max_replicas=9, downscale_delay_s=0.0, headroom=0.0, burst_memory_s=0.0)
DEPLOYMENT = DeploymentID(name="ReplicaServer", app_name="app")
AHEAD_S = time.time() + 3600


class Controller:
    """As much of Serve's controller as a policy sees, and a gateway at the board."""

    def __init__(self) -> None:
        self.policy = BlockScaling(msgspec.to_builtins(BASE))
        self.board = ScalingBoard("app", MemoryStore())
        self.link = BoardLink(self.board)
        self.link.stop()  # from now on it meets the board only when a test says so
        self.link._thread.join()
        self.link.meet()
        self.policy._link = self.link
        self.policy._export.publish_if_due = lambda points, now: None  # type: ignore[method-assign]

    def report(self, gateway_id: str = "g", **changes: Any) -> None:
        fields = {
            "time_s": time.time(),
            "demand": Demand(num_requests=1),
            "reserved_tokens": {},
            "base": BASE,
            "num_gateways": 1,
        }
        self.board.put_report(GatewayReport(gateway_id=gateway_id, **(fields | changes)))
        self.link.meet()

    def ask(
        self,
        *ledgers: dict[str, float],
        target: int | None = None,
        max_replicas: int = 1000,
        told_s: float | None = None,
    ) -> int:
        """The count that the policy wants when replicas r0, r1, ... have recorded ``ledgers``, now or at ``told_s``."""
        told_s = time.time() if told_s is None else told_s
        ids = [ReplicaID(f"r{i}", DEPLOYMENT) for i in range(len(ledgers))]
        raw: dict[str, dict[ReplicaID, Sequence[TimeStampedValue]]] = {}
        for replica_id, ledger in zip(ids, ledgers, strict=True):
            for name, value in ledger.items():
                raw.setdefault(name, {})[replica_id] = [TimeStampedValue(told_s, float(value))]
        context = AutoscalingContext(
            deployment_id=DEPLOYMENT,
            deployment_name=DEPLOYMENT.name,
            app_name="app",
            current_num_replicas=len(ids),
            target_num_replicas=len(ids) if target is None else target,
            running_replicas=ids,
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics=raw,
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=max_replicas,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=SimpleNamespace(max_replicas=1000),  # all that the policy reads of it
        )
        count, state = self.policy(context)
        assert state == {}, "what it remembers stays in the instance"
        self.link.meet()
        return count

    @property
    def last(self) -> ScaleRecord:
        record = self.board.current()
        assert record is not None
        return record


@pytest.fixture
def controller() -> Controller:
    return Controller()


def test_an_error_holds_the_count_and_is_told_once_a_minute(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the round in which Serve's controller updates all applications."""
    controller.report()
    monkeypatch.setattr(controller.policy, "_tell", lambda record, changes: None)  # is given too few
    with caplog.at_level("ERROR", logger="ray.serve"):
        assert [controller.ask(target=3) for _ in range(3)] == [3, 3, 3]
    assert caplog.text.count("it cannot decide") == 1
    assert "TypeError" in caplog.text


def test_a_ledger_comes_through_serve_whole(controller: Controller) -> None:
    stats = make_stats(num_free_blocks=60, num_running=3, num_waiting=2, num_waiting_tokens=77, busy_s=1.5, num_steps=9)
    controller.report(reserved_tokens={"r0": 41})
    controller.ask(ledger_metrics(stats))
    (row,) = controller.last.replicas
    assert row.stats is not None
    assert msgspec.structs.replace(row.stats, time_s=0.0) == stats
    assert isinstance(row.stats.num_running, int)
    assert (row.replica_id, row.connected, row.num_reserved_tokens) == ("r0", True, 41)
    assert 0.0 <= row.age_s < MAX_AGE_S


def test_a_replica_that_drains_adds_no_room(controller: Controller) -> None:
    controller.report()
    stats = make_stats(num_free_blocks=100)
    drains = ledger_metrics(msgspec.structs.replace(stats, draining=True))
    controller.ask(ledger_metrics(stats), drains)
    assert [row.stats.draining for row in controller.last.replicas if row.stats is not None] == [False, True]
    assert dict(controller.last.terms)["num_silent"] == 0


def test_a_replica_that_has_not_told_all_counts_as_silent(controller: Controller) -> None:
    controller.report()
    ledger = ledger_metrics(make_stats())
    assert controller.ask(ledger, {name: v for name, v in ledger.items() if name != "busy_s"}) == 2
    assert controller.last.reason == "hold: 1 of 2 replicas does not report"
    assert controller.last.replicas[1].stats is None


@pytest.mark.parametrize(
    "change", [{"time_s": AHEAD_S - 7200 - MAX_REPORT_AGE_S}, {"time_s": AHEAD_S}, {"num_gateways": 2}]
)
def test_gateways_that_are_silent_hold_the_count(controller: Controller, change: dict[str, Any]) -> None:
    controller.report(**change)
    assert controller.ask(*[ledger_metrics(make_stats())] * 3) == 3
    assert controller.last.reason == "hold: a gateway does not report"


@pytest.mark.parametrize("off_s", [-3600, -15, 15, 3600])
def test_a_replica_whose_clock_differs_counts_as_long_as_it_goes_on(controller: Controller, off_s: float) -> None:
    its_s = time.time() + off_s
    for number, is_heard in ((0, False), (1, True), (2, True)):
        controller.report()
        controller.ask(ledger_metrics(make_stats()), told_s=its_s + number)
        (row,) = controller.last.replicas
        assert (row.age_s <= MAX_AGE_S) == is_heard
        assert (controller.last.reason == "hold: 1 of 1 replicas does not report") == (not is_heard)


def test_the_newest_settings_hold_while_gateways_are_updated(controller: Controller) -> None:
    old, new = (replace(BASE, min_replicas=count, max_replicas=count) for count in (2, 8))
    wanted = []
    for _ in range(3):
        for name, base, since_s in (("old", old, 10.0), ("new", new, 20.0)):
            controller.report(name, num_gateways=2, base=base, base_since_s=since_s)
            wanted.append(controller.ask(*[ledger_metrics(make_stats())] * 2))
    assert wanted == [2, 8, 8, 8, 8, 8]


def test_what_one_gateway_holds_starts_a_replica_whatever_the_others_are(controller: Controller) -> None:
    none = replace(BASE, min_replicas=0)
    controller.report(num_gateways=2, base=none)
    assert controller.ask(target=0) == 0
    held = Demand(num_requests=3, num_prompt_tokens=300, num_held=3, num_held_tokens=300)
    controller.report(num_gateways=2, base=none, demand=held)
    assert controller.ask(target=0) == 1
    assert controller.last.reason == "up: 1 needed for requests that are held"
    (record,) = controller.board.records(0, 1)
    assert replay(record).num_replicas == 1


@pytest.mark.parametrize("off_s", [-3600, 3600])
def test_a_gateway_whose_clock_differs_counts_once_its_reports_go_on(controller: Controller, off_s: float) -> None:
    ledger, its_s = ledger_metrics(make_stats()), time.time() + off_s
    for reserved, is_heard in ((5, False), (6, True), (7, True)):
        controller.report(time_s=its_s + reserved, reserved_tokens={"r0": reserved})
        controller.ask(ledger)
        assert (controller.last.reason == "hold: a gateway does not report") == (not is_heard)
        assert controller.last.replicas[0].num_reserved_tokens == (reserved if is_heard else 0)


def test_all_gateways_count(controller: Controller) -> None:
    for name in ("g", "h"):
        controller.report(name, num_gateways=2, reserved_tokens={"r0": 20})
    controller.ask(ledger_metrics(make_stats()))
    assert controller.last.replicas[0].num_reserved_tokens == 40


def test_settings_follow_the_gateway_then_its_tuning_and_serves_capacity(controller: Controller) -> None:
    ledger = ledger_metrics(make_stats())
    newer = replace(BASE, min_replicas=4)
    controller.report(base=newer)
    assert controller.ask(ledger) == 4
    controller.board.put_tuning(Tuning(BASE, {"min_replicas": 8}))
    controller.link.meet()
    assert controller.ask(ledger) == 4, "that was for other settings"
    controller.board.put_tuning(Tuning(newer, {"min_replicas": 6}))
    controller.link.meet()
    assert controller.ask(ledger) == 6
    assert controller.ask(ledger, max_replicas=500) == 3, "half of all that is allowed"
    assert controller.last.config.max_replicas == 5


def test_the_count_holds_until_the_board_has_been_read(controller: Controller) -> None:
    """A policy that is new, as after a restart of Serve's controller, does not know what was tuned."""
    controller.report()
    controller.board.put_tuning(Tuning(BASE, {"max_replicas": 12}))
    controller.link.inbox = None
    assert controller.ask(target=15) == 15
    assert controller.ask(target=15) == 12


def test_settings_hold_however_old_the_last_report_is(controller: Controller) -> None:
    """Those of ``user_config`` are known by reports alone, and a policy that is new may see none that is fresh."""
    newer, old_s = replace(BASE, min_replicas=6, max_replicas=9), time.time() - MAX_REPORT_AGE_S - 60
    controller.report(base=newer, time_s=old_s)
    assert controller.ask(target=2) == 6
    assert controller.ask(target=12) == 12, "it may be of a gateway that is no more"
    controller.report(base=newer)
    assert controller.ask(target=12) == 9
    controller.report(base=newer, time_s=old_s)
    assert controller.ask(target=12) == 9


def test_until_a_gateway_has_reported_no_replica_is_stopped(controller: Controller) -> None:
    controller.link.meet()
    assert controller.ask(target=15) == 15
    assert controller.ask(target=0) == 1, "but started"
    controller.board.put_tuning(Tuning(BASE, {"min_replicas": 4}))
    controller.link.meet()
    assert controller.ask(target=2) == 4, "by what was tuned, too"
    controller.report()
    assert controller.ask(target=15) == 9


def test_changes_are_recorded_and_looks_are_not(controller: Controller) -> None:
    controller.report(base=replace(BASE, min_replicas=2))
    ledger = ledger_metrics(make_stats())
    assert controller.ask(ledger) == 2
    assert controller.ask(ledger, target=2) == 2
    assert [(r.num_before, r.num_after, r.num_running) for r in controller.board.records(0, 9)] == [(1, 2, 1)]
    assert (controller.last.num_starting, controller.last.seq) == (1, 1)


def test_what_replicas_record_is_what_the_policy_reads() -> None:
    names = set(ledger_metrics(make_stats()))
    assert names <= {*ReplicaStats.__struct_fields__}
    assert all(isinstance(value, (int, float)) for value in ledger_metrics(make_stats()).values())


def test_a_gateway_that_is_gone_does_not_stand_for_one_that_is_silent(controller: Controller) -> None:
    """Without the silent gateway, totals would fall, and all its requests would look like a burst once it is back."""
    ledger, now = ledger_metrics(make_stats()), time.time()
    controller.report("silent", num_gateways=2, time_s=now - MAX_REPORT_AGE_S - 1)
    controller.report("gone", num_gateways=2, time_s=now - 8)
    controller.report("its successor", num_gateways=2)
    controller.ask(ledger)
    assert controller.last.reason == "hold: a gateway does not report"
