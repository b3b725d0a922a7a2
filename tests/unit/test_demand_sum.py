"""Totals of all gateways only grow by what arrives, whatever becomes of the gateways."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.serve.demand_sum import DemandSum


def told(num_requests: int, num_held: int = 0) -> Demand:
    return Demand(
        num_requests=num_requests,
        num_prompt_tokens=10 * num_requests,
        num_shed=2 * num_requests,
        num_held=num_held,
        num_held_tokens=10 * num_held,
    )


def test_a_gateway_that_pauses_and_returns_is_no_burst() -> None:
    demand = DemandSum()
    assert demand.take({"old": told(50_000, 2), "new": told(1, 1)}) == told(50_001, 3)
    assert demand.take({"new": told(2)}).num_requests == 50_002, "its totals stay, without what it held"
    assert demand.take({"old": told(50_003), "new": told(3)}).num_requests == 50_006
    assert demand.take({"new": told(4)}).num_requests == 50_007


def test_one_that_is_heard_late_counts_from_then_on() -> None:
    demand = DemandSum()
    demand.take({"new": told(10)})
    assert demand.take({"old": told(50_000, 4), "new": told(11)}).num_requests == 11
    assert demand.take({"old": told(50_002, 4), "new": told(11)}) == told(13, 4)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1), min_size=1
    )
)
def test_it_never_falls_nor_grows_by_more_than_what_arrives(looks: list[dict[str, tuple[int, int]]]) -> None:
    demand, totals, before = DemandSum(), dict.fromkeys("abc", 1000), None
    for number, look in enumerate(looks):
        arrived = sum(came for came, _ in look.values())
        for name, (came, _) in look.items():
            totals[name] += came
        now = demand.take({name: told(totals[name], held) for name, (_, held) in look.items()})
        assert now.num_held == sum(held for _, held in look.values())
        if before is not None:
            assert 0 <= now.num_requests - before.num_requests <= arrived
        else:
            assert now.num_requests == sum(totals[name] for name in look), number
        before = now
