"""Replicas that stall: their step does not end, or they fall silent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fixtures.cluster_views import make_row, make_stats
from msgspec import structs

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.stall import LOOK_S, PAUSE_S, Progress, Stalls, stalled
from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import ReplicaStats

PACE = {
    "token_s": 0.01,
    "step_s": 0.4,
    "max_num_batched_tokens": 256,
    "num_running": 1,
}  # the longest step takes 2.96 s
OTHER = make_row("b", make_stats(token_s=0.01))


class Gateway:
    """A gateway that hears from replicas and looks for stalls, as the ledger does."""

    def __init__(self, *replica_ids: str, pause_s: float = math.inf) -> None:
        self.view = ClusterView()
        self.stalls = Stalls(self.view, pause_s)
        for replica_id in replica_ids:
            self.view.join(replica_id)
            self.view.apply_snapshot(replica_id, make_stats(), (), 0.0)

    def hear(self, replica_id: str, stats: ReplicaStats | None, now: float) -> list[str]:
        """Take a replica's news; returns the replicas then found to have stalled."""
        self.stalls.hear(replica_id, stats, now)
        self.view.apply_update(replica_id, stats, (), (), now)
        return self.look(now)

    def look(self, now: float) -> list[str]:
        return [replica_id for replica_id, _ in self.stalls.look(now).found]

    def takes(self, replica_id: str) -> bool:
        return not self.view.is_stalled(replica_id)


@pytest.mark.parametrize(
    ("quiet_s", "changes", "has_stalled"),
    [
        (11.0, {}, False),
        (12.0, {}, True),
        (12.0, {"token_s": 0.0}, False),  # the length of its steps is unknown
        (0.9, {"token_s": 1e-6, "step_s": 0.0}, False),
        (1.1, {"token_s": 1e-6, "step_s": 0.0}, True),
        (60.0, {"num_running": 0}, False),  # it is idle
    ],
)
def test_a_step_that_takes_several_times_the_longest_has_stalled(
    quiet_s: float, changes: dict[str, float], has_stalled: bool
) -> None:
    candidates = Candidates.of([make_row("a", make_stats(**(PACE | changes))), OTHER])
    assert stalled(candidates, np.array([quiet_s, 0.0])).tolist() == [has_stalled, False]


def test_nobody_has_stalled_where_nobody_else_could_take_what_waits() -> None:
    row = make_row("a", make_stats(**PACE))
    assert not stalled(Candidates.of([row]), np.array([60.0])).any()
    draining = make_row("b", make_stats(token_s=0.01, draining=True))
    assert not stalled(Candidates.of([row, draining]), np.array([60.0, 0.0])).any()
    assert not stalled(Candidates.of([row, make_row("b", make_stats(**PACE))]), np.array([60.0, 60.0])).any()


def test_progress_is_a_step_that_ends_or_having_nothing_to_do() -> None:
    begun = Progress(0.0, 0.0, True).after(make_stats(num_running=1, busy_s=2.0), 5.0)
    assert begun == Progress(2.0, 5.0, False)
    assert begun.after(make_stats(num_running=1, num_waiting=3, busy_s=2.0), 6.0) is begun
    assert begun.after(make_stats(num_waiting=1, busy_s=2.5), 6.0) == Progress(2.5, 6.0, False)
    idle = begun.after(make_stats(busy_s=2.0), 6.0)
    assert idle == Progress(2.0, 6.0, True)
    assert idle.after(make_stats(num_waiting=1, busy_s=2.0), 7.0) == Progress(2.0, 7.0, False), "its step begins now"


def test_who_stalls_is_found_once_and_takes_nothing_until_its_step_ends() -> None:
    gateway = Gateway("a", "b")
    busy = make_stats(num_running=1, busy_s=1.0, token_s=1e-4)
    gateway.hear("a", busy, 1.0)
    found = [gateway.hear("b", make_stats(num_running=1, busy_s=i, token_s=1e-4), 1.0 + i * 0.15) for i in range(1, 12)]
    assert found == [[]] * 7 + [["a"]] + [[]] * 3, "0.15 s after the step has taken a second"
    assert not gateway.takes("a")
    gateway.hear("a", structs.replace(busy, num_waiting=1), 3.0)
    assert not gateway.takes("a")
    gateway.hear("a", structs.replace(busy, busy_s=3.0), 3.1)
    assert gateway.takes("a")


def test_nobody_has_stalled_where_the_gateway_itself_stood_still() -> None:
    """Of the news that came meanwhile, it reads only one replica's before it looks."""
    gateway = Gateway("a", "b", "c")
    for step in range(10):
        for replica_id in ("a", "b", "c"):
            stats = make_stats(num_running=1, busy_s=0.03 * step, token_s=1e-4)
            assert not gateway.hear(replica_id, stats, 1.0 + 0.03 * step)
    for replica_id in ("a", "b", "c"):
        assert not gateway.hear(replica_id, make_stats(num_running=1, busy_s=2.0, token_s=1e-4), 5.0)
    assert not gateway.look(5.0 + 2 * LOOK_S)


def test_one_that_was_idle_has_stalled_only_once_it_has_told_of_work() -> None:
    """It does not know yet of a request just promised to it, and it last reported up to a heartbeat ago."""
    gateway = Gateway("a", "b")
    gateway.hear("a", make_stats(token_s=1e-4), 1.0)
    gateway.view.reserve("request", "a", 1, 16)
    for now in (2.2, 2.4, 2.6):
        assert not gateway.hear("b", make_stats(), now)
    gateway.hear("a", make_stats(num_running=1, token_s=1e-4), 2.7)
    assert [gateway.look(now) for now in (3.6, 3.8, 4.0)] == [[], [], ["a"]]


def test_one_that_has_stalled_takes_requests_again_once_nobody_else_does() -> None:
    gateway = Gateway("a", "b")
    gateway.hear("a", make_stats(num_running=1, token_s=1e-4), 1.0)
    for now in (2.1, 2.3):
        gateway.hear("b", make_stats(), now)
    assert not gateway.takes("a")
    told = make_stats(num_running=1, num_waiting=1, token_s=1e-4)
    gateway.hear("a", told, 2.4)
    gateway.view.leave("b")
    for now in (2.6, 2.8):
        gateway.look(now)
    row = gateway.view.candidates((), 2.8).view("a")
    assert (row.stats, row.stalled, row.age_s) == (told, False, pytest.approx(0.4))
    gateway.view.check_invariants()
    gateway.view.join("b")
    gateway.view.apply_snapshot("b", make_stats(), (), 2.9)
    assert [gateway.look(now) for now in (3.0, 3.2)] == [[], ["a"]], "there is another again"


def test_one_that_has_left_is_forgotten_though_its_last_requests_are_still_told_of() -> None:
    gateway = Gateway("a", "b")
    gateway.hear("a", make_stats(num_running=1, token_s=1e-4), 1.0)
    for now in (2.1, 2.3):
        gateway.hear("b", make_stats(), now)
    gateway.view.leave("a")
    gateway.hear("a", make_stats(num_running=1, token_s=1e-4), 2.4)
    gateway.hear("b", make_stats(), 2.5)
    gateway.hear("b", make_stats(), 2.7)
    assert gateway.stalls._progress.keys() == {"b"}
    assert not gateway.stalls._stalled


def test_one_that_falls_silent_takes_nothing_until_it_says_a_word() -> None:
    """An idle replica only sends heartbeats; without them, what it has free is no longer known."""
    gateway = Gateway("a", "b")
    gateway.hear("a", make_stats(), 1.0)
    found = [gateway.hear("b", None, 1.0 + 0.2 * i) for i in range(1, 13)]
    assert found == [[]] * 11 + [["a"]], "0.2 s after it was silent for two seconds"
    assert not gateway.takes("a")
    assert gateway.stalls.hear("a", None, 3.5)
    assert gateway.takes("a")
    assert not gateway.stalls.hear("a", None, 3.6), "that is no news"


def test_one_that_was_silent_in_a_step_takes_nothing_until_the_step_ends() -> None:
    gateway = Gateway("a", "b")
    busy = make_stats(num_running=1, busy_s=1.0, token_s=1e-4)
    gateway.hear("a", busy, 1.0)
    for now in (3.1, 3.3):
        gateway.hear("b", None, now)
    assert not gateway.takes("a")
    gateway.hear("a", None, 3.4)
    gateway.hear("b", None, 3.6)
    assert not gateway.takes("a")
    gateway.hear("a", structs.replace(busy, busy_s=3.5), 3.7)
    assert gateway.takes("a")


def test_nothing_goes_to_silent_ones_though_nobody_else_is_there() -> None:
    """No token could come back: requests wait at the gateway, from where they may still go elsewhere."""
    gateway = Gateway("a")
    assert [gateway.look(now) for now in (2.0, 2.1, 2.3)] == [[], [], ["a"]]
    assert not gateway.view.present(2.3).has_open()
    found = gateway.look(2.4)
    assert not found, "it is found once"
    assert gateway.stalls.hear("a", None, 2.5)
    assert gateway.view.present(2.5).has_open()


def test_nobody_is_found_silent_just_after_a_pause_of_the_gateway() -> None:
    """It reads the replicas' backlogs one after the other, which may take longer than two looks."""
    gateway = Gateway("a", "b", pause_s=PAUSE_S)
    for now in (1.0, 1.2, 1.4):
        gateway.hear("a", None, now)
        gateway.hear("b", None, now)
    assert gateway.look(4.0) == []
    assert [gateway.hear("a", None, now) for now in (4.05, 4.15, 4.3, 4.45)] == [[]] * 4
    assert gateway.takes("b")
    gateway.hear("b", None, 4.48)
    assert [gateway.look(now) for now in (4.6, 4.8)] == [[], []]
    for now in (5.0, 5.4, 5.8, 6.2, 6.6, 7.0):
        gateway.hear("a", None, now)
    assert not gateway.takes("b"), "it has said nothing since"


def test_one_that_was_silent_in_a_step_that_is_not_slow_is_told_of_when_it_speaks() -> None:
    gateway = Gateway("a", "b")
    gateway.hear("a", make_stats(**(PACE | {"token_s": 0.1})), 1.0)
    for now in (3.1, 3.3):
        gateway.hear("b", None, now)
    assert not gateway.takes("a")
    gateway.hear("a", None, 3.4)
    assert not gateway.takes("a"), "the step goes on"
    looks = [gateway.stalls.look(now) for now in (3.6, 3.8, 4.0)]
    assert [released for _, released in looks] == [("a",), (), ()]
    assert gateway.takes("a")


def test_one_whose_feed_breaks_while_it_is_silent_is_not_said_to_get_on() -> None:
    gateway = Gateway("a", "b")
    for now in (2.1, 2.3):
        gateway.hear("b", None, now)
    assert not gateway.takes("a")
    gateway.view.disconnect("a")
    assert [gateway.stalls.look(now).released for now in (2.5, 2.7, 2.9)] == [(), (), ()]
    gateway.stalls.forget("a")
    gateway.view.apply_snapshot("a", make_stats(), (), 3.0)
    assert gateway.takes("a")
    gateway.view.check_invariants()
