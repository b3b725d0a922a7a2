"""The gateway's view of the replicas."""

from __future__ import annotations

import pytest
from fixtures.cluster_views import make_stats

from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.view import ClusterView
from shoal_replica.prefix_cache import hash_blocks

A, B, C = hash_blocks(range(12), 4)


@pytest.fixture
def view() -> ClusterView:
    view = ClusterView()
    for replica_id in ("one", "two"):
        view.join(replica_id, f"node-of-{replica_id}")
        assert view.apply_snapshot(replica_id, make_stats(), [], now=10.0)
    return view


def row(view: ClusterView, replica_id: str, now: float = 10.0) -> ReplicaView:
    return next(r for r in view.replicas_for((A, B, C), now) if r.replica_id == replica_id)


def test_a_member_is_silent_until_its_snapshot() -> None:
    view = ClusterView()
    view.join("one", "node")
    assert view.replicas_for((), 5.0) == (ReplicaView(replica_id="one", node_id="node"),)
    assert not view.apply_update("one", make_stats(), [A], [], now=5.0)
    view.apply_snapshot("one", make_stats(num_free_blocks=7), [A], now=6.0)
    (only,) = view.replicas_for((A, B), 6.5)
    assert (only.connected, only.age_s, only.num_matched_blocks) == (True, 0.5, 1)
    assert only.stats is not None
    assert only.stats.num_free_blocks == 7


def test_updates_change_stats_blocks_and_age(view: ClusterView) -> None:
    view.apply_update("one", make_stats(num_running=3), [A, B], [], now=11.0)
    view.apply_update("one", make_stats(num_running=4), [C], [B], now=12.0)
    one = row(view, "one", now=12.25)
    assert one.stats is not None
    assert (one.stats.num_running, one.num_matched_blocks, one.age_s) == (4, 1, 0.25)
    assert row(view, "two", now=12.25).age_s == 2.25


def test_a_snapshot_replaces_what_was_held(view: ClusterView) -> None:
    view.apply_update("one", make_stats(), [A, B], [], now=11.0)
    view.apply_snapshot("one", make_stats(), [A], now=12.0)
    assert row(view, "one").num_matched_blocks == 1


def test_news_of_strangers_is_dropped(view: ClusterView) -> None:
    view.leave("two")
    assert not view.apply_snapshot("two", make_stats(), [A], now=11.0)
    assert not view.apply_update("two", make_stats(), [A], [], now=11.0)
    view.disconnect("two")
    view.reserve("r", "two", 1, 1)
    assert view.reservation("r") is None
    assert view.replica_ids == ("one",)
    view.check_invariants()


def test_disconnect_needs_a_new_snapshot(view: ClusterView) -> None:
    view.disconnect("one")
    assert not row(view, "one").connected
    assert not view.apply_update("one", make_stats(), [], [], now=11.0)
    told = view.present(10.0).told[0].item()
    view.apply_snapshot("one", view.present(10.0).stats[0] or make_stats(), [], now=11.0)
    assert row(view, "one").connected
    assert told != view.present(11.0).told[0].item()
    view.check_invariants()


def test_promises_add_up_and_end(view: ClusterView) -> None:
    view.reserve("r1", "one", 3, 40)
    view.reserve("r2", "one", 2, 10)
    one = row(view, "one")
    assert (one.num_reserved, one.num_reserved_blocks, one.num_reserved_tokens) == (2, 5, 50)
    view.settle(["r1", "unknown"])
    view.settle(["r1"])
    assert row(view, "one").num_reserved_blocks == 2
    view.release("r2")
    view.release("r2")
    assert row(view, "one").num_reserved_tokens == 0
    view.check_invariants()


def test_a_request_holds_one_promise(view: ClusterView) -> None:
    view.reserve("r", "one", 3, 40)
    view.reserve("r", "two", 5, 60)
    assert (row(view, "one").num_reserved, row(view, "two").num_reserved_blocks) == (0, 5)
    view.move("r", "one")
    assert (row(view, "one").num_reserved_blocks, row(view, "two").num_reserved) == (5, 0)
    view.move("unknown", "one")
    view.check_invariants()


def test_leaving_takes_promises_and_blocks_along(view: ClusterView) -> None:
    view.apply_update("one", make_stats(), [A], [], now=11.0)
    view.reserve("r", "one", 3, 40)
    view.leave("one")
    view.leave("one")
    view.release("r")
    view.join("one")
    assert row(view, "one") == ReplicaView(replica_id="one")
    view.check_invariants()


def test_rows_are_sorted_and_frozen_in_time(view: ClusterView) -> None:
    view.join("a")
    before = view.replicas_for((), 10.0)
    view.reserve("r", "one", 3, 40)
    assert [r.replica_id for r in before] == ["a", "one", "two"]
    assert all(r.num_reserved == 0 for r in before)


def test_who_joins_at_once_is_as_who_joins_one_by_one(view: ClusterView) -> None:
    view.apply_update("one", make_stats(), [A], [], now=11.0)
    view.join_all({"three": "node", "a": "", "two": "", "one": "other"})
    assert view.replica_ids == ("a", "one", "three", "two")
    assert [(r.replica_id, r.node_id, r.num_matched_blocks) for r in view.replicas_for((A,), 11.0)] == [
        ("a", "", 0),
        ("one", "other", 1),
        ("three", "node", 0),
        ("two", "node-of-two", 0),
    ]
    view.check_invariants()


def test_a_snapshot_outlives_all_changes(view: ClusterView) -> None:
    view.apply_update("one", make_stats(num_running=3, num_waiting_tokens=40), [A], [], now=10.0)
    before, read = view.candidates((A, B), 10.5), view.candidates((A, B), 10.5)
    rows, told, columns = read.views(), read.told.tolist(), read.columns.tolist()
    view.reserve("r", "one", 3, 40)
    view.set_foreign("two", 1, 2, 3)
    view.apply_update("one", make_stats(num_running=5), [B], [A], now=11.0)
    view.disconnect("two")
    view.join("three", "node")
    view.leave("one")
    assert (before.views(), before.told.tolist(), before.columns.tolist()) == (rows, told, columns)
    assert view.candidates((A, B), 11.0).told.tolist() != told
    view.check_invariants()


def test_what_is_given_away_is_copied_before_it_changes(view: ClusterView) -> None:
    view.reserve("r", "one", 3, 40)
    before = view.candidates((), 10.0)
    assert view.candidates((), 10.0) is before
    view.release("r")
    assert before.num_reserved.tolist() == [1, 0]
    assert view.candidates((), 10.0).num_reserved.tolist() == [0, 0]


def test_who_has_stalled_takes_nothing_until_it_is_taken_back_or_begins_anew() -> None:
    view = ClusterView()
    for replica_id in ("a", "b"):
        view.join(replica_id)
        view.apply_snapshot(replica_id, make_stats(), (), 0.0)
    before = view.candidates((), 1.0)
    view.set_stalled("a", True)
    view.set_stalled("stranger", True)
    assert [row.stalled for row in view.replicas_for((), 1.0)] == [True, False]
    assert [state.stalled for state in before.states] == [False, False]
    assert not before.told["stalled"].any()
    assert view.is_stalled("a")
    assert not view.is_stalled("stranger")
    present = view.present(1.0)
    assert present.has_open()
    assert not present.has_open({"b"})
    view.apply_update("a", make_stats(num_free_blocks=50), (), (), 2.0)
    view.join("0")
    view.check_invariants()
    assert view.is_stalled("a"), "news alone do not say that it gets on"
    view.set_stalled("a", False)
    assert view.present(2.0).has_open({"b"})
    view.set_stalled("a", True)
    view.disconnect("a")
    view.apply_snapshot("a", make_stats(), (), 3.0)
    assert not view.is_stalled("a")
    view.check_invariants()
