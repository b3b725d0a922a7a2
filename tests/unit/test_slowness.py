"""How slow replicas are, as a gateway sees it."""

from __future__ import annotations

import pytest
from fixtures.cluster_views import make_stats

from shoal_cluster.policies.slowness import MIN_REPORTS, WINDOW_S, Slowness, steps_from_median
from shoal_cluster.policies.view import ClusterView


class Gateway:
    """Hears of replicas, each of which tells its pace."""

    def __init__(self, *replica_ids: str) -> None:
        self.view, self.now = ClusterView(), 0.0
        self.slowness = Slowness(self.view)
        for replica_id in replica_ids:
            self.view.join(replica_id)
            self.view.apply_snapshot(replica_id, make_stats(), (), 0.0)

    def hear(self, count: int = MIN_REPORTS, num_running: int = 1, **token_s: float) -> dict[str, float]:
        """So many reports of each, one a second; returns what the view knows then."""
        for _ in range(count):
            self.now += 1.0
            for replica_id, its_token_s in token_s.items():
                stats = make_stats(token_s=its_token_s, num_running=num_running)
                self.slowness.hear(replica_id, stats, self.now)
                self.view.apply_update(replica_id, stats, (), (), self.now)
        self.slowness.hear("a", None, self.now + 1.0)
        self.view.check_invariants()
        return {row.replica_id: row.slowness for row in self.view.replicas_for((), self.now)}


def test_who_takes_twice_as_long_is_known_after_some_reports() -> None:
    gateway = Gateway("a", "b", "c")
    assert gateway.hear(MIN_REPORTS - 1, a=1e-4, b=1e-4, c=2e-4) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert gateway.hear(2, a=1e-4, b=1e-4, c=2e-4) == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_like_replicas_are_alike_whatever_they_compute() -> None:
    gateway = Gateway("a", "b", "c")
    assert set(gateway.hear(a=1.0e-4, b=1.15e-4, c=0.9e-4).values()) == {1.0}
    assert set(gateway.hear(40, a=1.8e-4, b=3.0e-4, c=0.95e-4).values()) == {1.0}, "their fastest of a minute count"


def test_the_fastest_is_what_others_are_compared_with() -> None:
    gateway = Gateway("a", "b", "c")
    assert gateway.hear(a=1e-4, b=1e-4, c=0.25e-4) == {"a": 4.0, "b": 4.0, "c": 1.0}


def test_a_replica_that_becomes_slow_is_found_within_two_windows_and_one_that_recovers_at_once() -> None:
    gateway = Gateway("a", "b", "c")
    gateway.hear(a=1e-4, b=1e-4, c=1e-4)
    told = gateway.hear(int(2 * WINDOW_S) + 3, a=1e-4, b=1e-4, c=2.9e-4)
    assert told == {"a": 1.0, "b": 1.0, "c": 2.83}
    assert set(gateway.hear(1, a=1e-4, b=1e-4, c=1e-4).values()) == {1.0}


def test_idle_replicas_say_nothing_new_of_their_pace() -> None:
    gateway = Gateway("a", "b")
    gateway.hear(a=1e-4, b=2e-4)
    assert gateway.hear(300, num_running=0, a=1e-4, b=1e-4) == {"a": 1.0, "b": 2.0}


def test_who_has_left_is_forgotten_and_who_is_new_counts_as_fast() -> None:
    gateway = Gateway("a", "b", "c")
    gateway.hear(a=1e-4, b=1e-4, c=4e-4)
    gateway.view.leave("c")
    gateway.view.join("d")
    gateway.view.apply_snapshot("d", make_stats(), (), gateway.now)
    assert gateway.hear(1, a=1e-4, b=1e-4) == {"a": 1.0, "b": 1.0, "d": 1.0}
    gateway.view.join("c")
    assert gateway.hear(1, a=1e-4, b=1e-4)["c"] == 1.0


@pytest.mark.parametrize(
    ("ratio", "before", "after"),
    [(1.0, 0, 0), (1.27, 0, 0), (1.28, 0, 1), (1.28, 1, 1), (1.1, 1, 0), (1.12, 1, 1), (1.8, 1, 1), (1.81, 1, 2)],
)
def test_a_step_is_kept_until_it_is_clearly_another(ratio: float, before: int, after: int) -> None:
    token_s = {"a": 1.0, "b": 1.0, "c": ratio}
    assert steps_from_median(token_s, {"c": before})["c"] == after


def test_nobody_is_compared_with_nobody() -> None:
    assert steps_from_median({}, {}) == {}
    assert steps_from_median({"a": 1e-4}, {"a": 3}) == {"a": 0}
