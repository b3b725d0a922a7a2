"""Routing shares: each decision is counted once, however often and however late the tally looks."""

from __future__ import annotations

from fixtures.fake_gateway import example_record

from shoal_cluster.serve.dashboard.tally import NUM_COUNTED, NUM_LOOKED_AT, RouteTally, Share, cached_blocks


class Routes:
    """Decisions that a core would keep, newest first."""

    def __init__(self) -> None:
        self.records = []

    def take(self, count: int) -> None:
        for _ in range(count):
            number = len(self.records)
            self.records.insert(0, example_record(f"r{number}")._replace(time_s=1000.0 + number // 3))

    def __call__(self, limit: int):
        return self.records[:limit]


def test_a_decision_tells_what_its_first_choice_had() -> None:
    assert cached_blocks(example_record()) == (1, 2)


def test_each_decision_is_counted_once() -> None:
    routes, tally = Routes(), RouteTally()
    tally.count(routes)
    assert (tally.num_decisions, tally.shares()) == (0, {})
    for count in (3, 0, 1, NUM_LOOKED_AT - 1, 0, NUM_LOOKED_AT + 50):
        routes.take(count)
        tally.count(routes)
        assert tally.num_decisions == len(routes.records)
    total = tally.num_decisions
    assert tally.shares() == {"r0": Share(total, total, 2 * total)}


def test_after_a_long_time_without_a_look_only_the_last_ones_count() -> None:
    routes, tally = Routes(), RouteTally()
    routes.take(10)
    tally.count(routes)
    routes.take(3 * NUM_COUNTED)
    tally.count(routes)
    assert tally.num_decisions == NUM_COUNTED
