"""How slow replicas are, as a gateway sees it."""

from __future__ import annotations

import pytest
from fixtures.cluster_views import make_stats

from shoal_cluster.policies.slowness import LOOK_S, Slowness, doublings_from_fastest
from shoal_cluster.policies.view import ClusterView


class Gateway:
    """A gateway that hears from replicas, each of which reports its pace."""

    def __init__(self, *replica_ids: str) -> None:
        self.view, self.now = ClusterView(), 0.0
        self.slowness = Slowness(self.view)
        for replica_id in replica_ids:
            self.view.join(replica_id)
            self.view.apply_snapshot(replica_id, make_stats(), (), 0.0)

    def hear(self, **full_token_s: float) -> dict[str, float]:
        """Take a report of each; returns how slow every replica is in the view then."""
        for replica_id, its_token_s in full_token_s.items():
            self.view.apply_update(replica_id, make_stats(full_token_s=its_token_s), (), (), self.now)
        self.now += LOOK_S
        self.slowness.look(self.now)
        self.view.check_invariants()
        return {row.replica_id: row.slowness for row in self.view.replicas_for((), self.now)}


def test_others_are_compared_with_the_fastest() -> None:
    gateway = Gateway("a", "b", "c")
    assert gateway.hear(a=1e-4, b=2.1e-4, c=1.2e-4) == {"a": 1.0, "b": 2.0, "c": 1.0}
    assert gateway.hear(a=4e-4, b=2e-4, c=0.25e-4) == {"a": 16.0, "b": 8.0, "c": 1.0}
    assert gateway.hear(c=1.3e-4) == {"a": 4.0, "b": 2.0, "c": 1.0}


def test_who_has_measured_nothing_lately_counts_as_fast() -> None:
    gateway = Gateway("a", "b", "c")
    assert gateway.hear(a=1e-4) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert gateway.hear(b=4e-4) == {"a": 1.0, "b": 4.0, "c": 1.0}
    assert gateway.hear(b=0.0) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert gateway.hear(b=1.2e-4) == {"a": 1.0, "b": 1.0, "c": 1.0}, "it begins anew"


def test_who_takes_nothing_is_nobodys_measure() -> None:
    gateway = Gateway("a", "b", "c")
    assert gateway.hear(a=1e-4, b=4e-4, c=8e-4) == {"a": 1.0, "b": 4.0, "c": 8.0}
    gateway.view.set_stalled("a", True)
    assert gateway.hear() == {"a": 1.0, "b": 1.0, "c": 2.0}
    gateway.view.leave("b")
    assert gateway.hear()["c"] == 1.0
    gateway.view.set_stalled("a", False)
    assert gateway.hear()["c"] == 8.0


def test_looks_are_a_second_apart() -> None:
    gateway = Gateway("a", "b")
    gateway.hear(a=1e-4, b=1e-4)
    gateway.view.apply_update("b", make_stats(full_token_s=4e-4), (), (), gateway.now)
    gateway.slowness.look(gateway.now + 0.9 * LOOK_S)
    assert gateway.view.candidates((), 0.0).view("b").slowness == 1.0
    gateway.slowness.look(gateway.now + LOOK_S)
    assert gateway.view.candidates((), 0.0).view("b").slowness == 4.0


@pytest.mark.parametrize(
    ("ratio", "before", "after"),
    [(1.0, 0, 0), (1.62, 0, 0), (1.63, 0, 1), (3.2, 1, 1), (3.3, 1, 2), (1.42, 1, 1), (1.41, 1, 0), (1.41, 2, 0)],
)
def test_a_doubling_is_kept_until_it_is_clearly_another(ratio: float, before: int, after: int) -> None:
    assert doublings_from_fastest({"a": 1.0, "c": ratio}, {"c": before}) == {"a": 0, "c": after}


def test_nobody_is_compared_with_nobody() -> None:
    assert doublings_from_fastest({}, {}) == {}
    assert doublings_from_fastest({"a": 1e-4}, {"a": 3}) == {"a": 0}
