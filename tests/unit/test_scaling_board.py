"""Gateways and the scaling policy meet at the board: reports go one way, decisions the other, settings are kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from fixtures.cluster_views import make_stats
from fixtures.fake_gateway import example_scale_record
from fixtures.memory_store import MemoryStore
from fixtures.waiting import DEADLINE_S, until
from msgspec.structs import replace as replace_struct

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import scaling_desk
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.scaling_board import RECORDS_KEPT, GatewayReport, ScalingBoard, Tuning
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.scaling_link import FORGOTTEN_S, BoardLink
from shoal_replica.errors import InvalidArgument, Unavailable

BASE = ScaleConfig(max_replicas=4)
SHED = CallRecord(request_id="shed", outcome=RequestOutcome.SHED, time_s=0.0, arrived_s=0.0, ended_s=0.0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def board(store: MemoryStore) -> ScalingBoard:
    return ScalingBoard("app", store)


@pytest.fixture
async def desk(board: ScalingBoard) -> AsyncIterator[ScalingDesk]:
    ledger = GatewayLedger("g", RouteWeights())
    desk = ScalingDesk(board, ledger, 1, BASE)
    desk.rebase(BASE)
    yield desk
    await desk.close()
    await ledger.close()
    assert board.reports() == []


@pytest.fixture
def link(board: ScalingBoard) -> BoardLink:
    """Exchanges news with the board only when a test calls ``meet``."""
    link = BoardLink(board)
    link.stop()
    return link


def test_applications_do_not_meet(store: MemoryStore, board: ScalingBoard) -> None:
    board.put_current(example_scale_record())
    assert ScalingBoard("other", store).current() is None


def test_records_are_a_ring(board: ScalingBoard) -> None:
    for seq in range(1, RECORDS_KEPT + 4):
        board.put_record(example_scale_record(seq))
    kept = board.records(0, RECORDS_KEPT + 3)
    assert [record.seq for record in kept] == list(range(4, RECORDS_KEPT + 4))
    assert kept[0] == example_scale_record(4)
    assert board.records(RECORDS_KEPT + 2, RECORDS_KEPT + 3) == [example_scale_record(RECORDS_KEPT + 3)]


def test_what_another_version_wrote_reads_as_absent(store: MemoryStore, board: ScalingBoard) -> None:
    board.put_tuning(Tuning(BASE, {"max_replicas": 5}))
    (key,) = store.values
    for wrong in (b"", b"\xff", b"\x81\xa1x\x01"):
        store.values[key] = wrong
        assert board.tuning() is None
    for changes in ({"max_replicas": 5000}, {"forgotten": 1}):
        board.put_tuning(Tuning(BASE, changes))
        assert board.tuning() is None
    board.put_tuning(Tuning(BASE, {}))
    store.values[key] = store.values[key].replace(b"\xacmax_replicas\x04", b"\xacmax_replicas\x00")
    assert board.tuning() is None


async def test_a_report_says_what_came_and_what_is_promised(board: ScalingBoard, desk: ScalingDesk) -> None:
    desk._ledger.view.join("r")
    desk._ledger.view.apply_snapshot("r", make_stats(), (), 0.0)
    desk._ledger.view.reserve("request", "r", 2, 30)
    desk.meter.arrive(100)
    desk.meter.take(SHED)
    desk.meter.arrive(50)
    await until(lambda: any(r.demand.num_requests for r in board.reports()))
    (report,) = board.reports()
    assert report.demand == Demand(num_requests=2, num_prompt_tokens=150, num_shed=1)
    assert report.reserved_tokens == {"r": 30}
    assert report.base == BASE


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A desk that reports once, and then not for an hour unless something makes it."""
    monkeypatch.setattr(scaling_desk, "PERIOD_S", 3600.0)


@pytest.mark.usefixtures("slow")
async def test_a_held_request_is_told_at_once(board: ScalingBoard, desk: ScalingDesk) -> None:
    await until(lambda: bool(board.reports()))
    with desk.holding(20):
        await until(lambda: board.reports()[0].demand.num_held == 1)
    assert desk.meter.demand.num_held == desk.meter.demand.num_held_tokens == 0


async def test_decisions_reach_the_desk(desk: ScalingDesk, link: BoardLink) -> None:
    link.tell(example_scale_record(0), changes=True)
    link.tell(example_scale_record(0, 3, 3), changes=False)
    link.meet()
    await until(lambda: desk.row().current is not None)
    assert desk.row().current == replace(example_scale_record(0, 3, 3), seq=1)
    assert [(r.seq, r.num_after) for r in desk.row().records] == [(1, 3)]
    link.tell(example_scale_record(0, 3, 2), changes=True)
    link.meet()
    await until(lambda: len(desk.row().records) == 2)
    assert [(r.seq, r.num_after) for r in desk.row().records] == [(1, 3), (2, 2)]


def test_a_decision_that_could_not_be_written_is_written_later(
    board: ScalingBoard, link: BoardLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.tell(example_scale_record(0), changes=True)
    link.tell(example_scale_record(0, 3, 2), changes=True)
    monkeypatch.setattr(board, "put_record", _unavailable)
    with pytest.raises(Unavailable):
        link.meet()
    monkeypatch.undo()
    link.meet()
    assert [(record.seq, record.num_after) for record in board.records(0, 2)] == [(1, 3), (2, 2)]


def test_a_gateway_that_was_killed_is_forgotten(board: ScalingBoard, link: BoardLink) -> None:
    report = GatewayReport("killed", time.time() - 2 * FORGOTTEN_S, Demand(), {}, BASE, 1)
    board.put_report(report)
    board.put_report(replace_struct(report, gateway_id="silent", time_s=time.time() - FORGOTTEN_S / 2))
    link.meet()
    assert [left.gateway_id for left in board.reports()] == ["silent"]


def _unavailable(*_: object) -> None:
    raise Unavailable("Ray's head does not answer")


async def test_tuning_does_not_wait_for_ever(desk: ScalingDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_desk, "TUNE_TIMEOUT_S", 0.05)
    async with desk._meeting:
        with pytest.raises(Unavailable, match="Ray's head has not answered"):
            await desk.tune({"max_replicas": 9}, reset=False)
    assert (await desk.tune({"max_replicas": 9}, reset=False)).tuned == ("max_replicas",)


async def test_the_desk_knows_when_replicas_start(desk: ScalingDesk, link: BoardLink) -> None:
    fresh_s, old_s = time.time(), time.time() - 3600
    starting = replace(example_scale_record(0, 3, 3), num_running=1, time_s=fresh_s)
    ready, old = replace(starting, num_running=3), replace(starting, time_s=old_s)
    assert not desk.is_growing()
    for record, expected in ((starting, True), (ready, False), (starting, True), (old, False)):
        link.tell(record, changes=False)
        link.meet()
        desk._hurry.set()
        await until(lambda: desk.is_growing() is expected)  # noqa: B023 - called within the loop


def test_a_new_policy_goes_on_counting(board: ScalingBoard, link: BoardLink) -> None:
    link.tell(example_scale_record(0), changes=True)
    link.meet()
    again = BoardLink(board)
    again.stop()
    again.tell(example_scale_record(0), changes=True)
    again.meet()
    assert [record.seq for record in board.records(0, 2)] == [1, 2]


async def test_tuning_holds_until_the_deployment_changes(board: ScalingBoard, desk: ScalingDesk) -> None:
    row = await desk.tune({"max_replicas": 9, "min_replicas": 1}, reset=False)
    assert (row.config.max_replicas, row.tuned) == (9, ("max_replicas",))
    assert board.tuning() == Tuning(BASE, {"max_replicas": 9})
    row = await desk.tune({"downscale_delay_s": 60}, reset=False)
    assert row.tuned == ("downscale_delay_s", "max_replicas")
    with pytest.raises(InvalidArgument, match="min_replicas: got 10"):
        await desk.tune({"min_replicas": 10}, reset=False)
    assert desk.row() == row
    desk.rebase(BASE)
    assert desk.row() == row
    desk.rebase(replace(BASE, target_utilization=0.6))
    assert desk.row().tuned == ()
    await until(lambda: board.reports()[0].base.target_utilization == 0.6)
    assert desk.row().tuned == ()


async def test_tuning_that_has_ended_does_not_come_back_with_the_former_settings(
    board: ScalingBoard, desk: ScalingDesk
) -> None:
    await desk.tune({"max_replicas": 9}, reset=False)
    desk.rebase(replace(BASE, target_utilization=0.6))
    await until(lambda: board.tuning() is None)
    desk.rebase(BASE)
    await until(lambda: board.reports()[0].base == BASE)
    assert desk.row().tuned == ()


async def test_a_gateway_with_former_settings_does_not_end_the_tuning_of_newer_ones(
    board: ScalingBoard, desk: ScalingDesk
) -> None:
    newer = replace(BASE, max_replicas=5)
    await until(lambda: bool(board.reports()))
    (former,) = board.reports()
    board.put_report(replace_struct(former, gateway_id="newer", base=newer, base_since_s=former.base_since_s + 1))
    board.put_tuning(Tuning(newer, {"max_replicas": 7}))
    desk._hurry.set()
    for _ in range(2):  # with the second report, what came with the first has been looked at
        told_s = {r.gateway_id: r for r in board.reports()}["g"].time_s
        await until(lambda told_s=told_s: {r.gateway_id: r for r in board.reports()}["g"].time_s > told_s)
    assert board.tuning() == Tuning(newer, {"max_replicas": 7})
    board.drop_report("newer")


async def test_reset_goes_back_to_the_deployment(desk: ScalingDesk) -> None:
    await desk.tune({"max_replicas": 9}, reset=False)
    row = await desk.tune({"downscale_delay_s": 60}, reset=True)
    assert (row.config.max_replicas, row.tuned) == (4, ("downscale_delay_s",))


async def test_what_one_gateway_tunes_others_follow(board: ScalingBoard, desk: ScalingDesk) -> None:
    board.put_tuning(Tuning(BASE, {"max_replicas": 6}))
    await until(lambda: desk.row().config.max_replicas == 6)
    board.put_tuning(Tuning(replace(BASE, max_replicas=5), {"max_replicas": 7}))
    desk._hurry.set()
    await until(lambda: desk.row().tuned == ())


async def test_a_gateway_that_does_not_know_its_settings_yet_reports_none(board: ScalingBoard) -> None:
    """Serve tells them after it has made the gateway: until then those of ``args`` would be in force."""
    ledger = GatewayLedger("g", RouteWeights())
    desk = ScalingDesk(board, ledger, 1, BASE)
    assert desk._task is None
    desk.rebase(replace(BASE, max_replicas=7))
    await until(lambda: bool(board.reports()))
    assert board.reports()[0].base.max_replicas == 7
    await desk.close()
    untold = ScalingDesk(board, ledger, 1, BASE)
    untold.start()  # where Serve never does
    await until(lambda: bool(board.reports()))
    assert board.reports()[0].base == BASE
    await untold.close()
    untold.start()
    assert board.reports() == []
    await ledger.close()


@pytest.mark.usefixtures("slow")
async def test_what_another_gateway_has_just_tuned_stays(board: ScalingBoard, desk: ScalingDesk) -> None:
    await until(lambda: bool(board.reports()))
    board.put_tuning(Tuning(BASE, {"max_replicas": 9}))
    row = await desk.tune({"downscale_delay_s": 60}, reset=False)
    assert row.tuned == ("downscale_delay_s", "max_replicas")
    assert board.tuning() == Tuning(BASE, {"downscale_delay_s": 60.0, "max_replicas": 9})
    board.put_tuning(Tuning(replace(BASE, max_replicas=5), {"max_replicas": 8}))
    assert (await desk.tune({}, reset=False)).tuned == (), "those were for other settings"


async def test_a_report_on_its_way_does_not_outlive_its_gateway(store: MemoryStore, board: ScalingBoard) -> None:
    is_on_its_way, may_arrive = threading.Event(), threading.Event()

    def put(key: str, value: bytes) -> None:
        is_on_its_way.set()
        may_arrive.wait(DEADLINE_S)
        store.values[key] = value

    store.put = put  # type: ignore[method-assign]
    ledger = GatewayLedger("g", RouteWeights())
    desk = ScalingDesk(board, ledger, 1, BASE)
    desk.rebase(BASE)
    await until(is_on_its_way.is_set)
    closing = asyncio.create_task(desk.close())
    await until(lambda: desk._thread._work_queue.qsize() > 0)  # its report is to be dropped
    may_arrive.set()
    await closing
    assert store.values == {}
    await ledger.close()
