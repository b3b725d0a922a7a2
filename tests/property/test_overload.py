"""Due dates met together, against all choices of what to put off; waits, against a level found by bisection."""

from __future__ import annotations

from itertools import combinations

import pytest
from fixtures.cluster_views import make_row, make_stats
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import RENEWAL
from shoal_cluster.policies.overload import EPSILON_S, MOST_LENGTHS, Backlog, Claim, met_together

TOKEN_S = 0.001
LENGTH_S = 3.0

seconds = st.integers(0, 30).map(lambda tenths: tenths / 10)
newcomers = st.builds(
    lambda arrival_s, takes_s: Claim((0, 0), arrival_s + LENGTH_S, takes_s, arrival_s, LENGTH_S),
    arrival_s=seconds.map(lambda ago_s: -ago_s),
    takes_s=st.integers(1, 30).map(lambda tenths: tenths / 10),
)
rows = st.lists(
    st.builds(
        lambda waiting, step_s, slots, slowness: (waiting, step_s, slots, slowness),
        waiting=st.integers(0, 3000),
        step_s=st.sampled_from([0.0, 0.2, 1.0]),
        slots=st.integers(0, 2),
        slowness=st.sampled_from([1.0, 2.0]),
    ),
    min_size=1,
    max_size=5,
)


def one_machine() -> Backlog:
    return Backlog.of(Candidates.of([make_row("only", stats=make_stats())]), TOKEN_S)


def are_met(claims: list[Claim], backlog: Backlog) -> bool:
    before_s = 0.0
    for claim in sorted(claims, key=lambda claim: claim[:2]):
        if backlog.first_token_s(claim.due_s, claim.takes_s, before_s) > claim.due_s + EPSILON_S:
            return False
        before_s += claim.takes_s
    return True


@example([Claim((0, 0), LENGTH_S, takes_s, 0.0, LENGTH_S) for takes_s in (0.1, 0.1, 2.4, 0.2, 0.2)])
@given(st.lists(newcomers, max_size=7))
def test_one_machine_meets_as_many_dates_as_can_be(claims: list[Claim]) -> None:
    """Steps take no time here, so that prompts simply follow one another, as Moore's rule assumes."""
    backlog = Backlog(0.0, 0.0, one_machine().levels)
    claims = [claim for claim in claims if claim.takes_s <= claim.due_s]
    dates = met_together(claims, backlog)
    most = next(
        size
        for size in range(len(claims), -1, -1)
        if any(are_met(list(chosen), backlog) for chosen in combinations(claims, size))
    )
    assert sum(date == claim.due_s for date, claim in zip(dates, claims, strict=True)) == most


@example(
    [Claim((0, 0), LENGTH_S, takes_s, 0.0, LENGTH_S) for takes_s in (0.1, 0.1, 0.1, 0.1, 1.2, 0.7)],
    [(390, 0.2, 1, 1.0), (655, 1.0, 1, 1.0)],
    [],
    0,
)
@given(st.lists(newcomers, max_size=30), rows, st.lists(st.tuples(seconds, seconds), max_size=3), st.integers(0, 1))
def test_dates_are_put_off_by_whole_renewals_until_all_are_met(
    claims: list[Claim], replicas: list[tuple[int, float, int, float]], late: list[tuple[float, float]], group: int
) -> None:
    """Except for requests that no longer give way. Higher groups do not change the dates of lower ones."""
    backlog = Backlog.of(candidates(replicas), TOKEN_S)
    lost = [Claim((0, 0), due_s, takes_s, due_s - LENGTH_S * RENEWAL, LENGTH_S) for due_s, takes_s in late]
    claims = [*claims, *lost]
    others = [claim._replace(group=(1, 0)) for claim in claims] if group else []
    dates = met_together([*claims, *others], backlog)
    assert dates[: len(claims)] == met_together(claims, backlog)
    for claim, date in zip(claims, dates, strict=False):
        lengths, num_renewals = (date - claim.arrival_s) / LENGTH_S, 0
        while RENEWAL**num_renewals < lengths * 0.999:
            num_renewals += 1
        assert lengths == pytest.approx(RENEWAL**num_renewals)
        assert lengths <= MOST_LENGTHS * 1.001
    dated = [claim._replace(due_s=date) for claim, date in zip(claims, dates, strict=False)]
    if all(claim.due_s - claim.arrival_s < LENGTH_S * MOST_LENGTHS * 0.999 for claim in dated):
        assert are_met(dated, backlog)


@given(st.lists(newcomers, min_size=1, max_size=12))
def test_what_is_lost_is_put_off_first_and_not_for_ever(claims: list[Claim]) -> None:
    """A request that has lost its objective keeps no newcomer from meeting its own."""
    backlog = one_machine()
    lost = Claim((0, 0), -9.0 + LENGTH_S * RENEWAL, 2.0, -9.0, LENGTH_S)
    with_it, without = met_together([*claims, lost], backlog), met_together(claims, backlog)
    for claim, date, date_without in zip(claims, with_it, without, strict=False):
        assert (date == claim.due_s) == (date_without == claim.due_s)
    last = lost._replace(arrival_s=lost.due_s - LENGTH_S * MOST_LENGTHS)
    assert met_together([*claims, last], backlog)[-1] == last.due_s


@given(rows, st.integers(0, 100).map(lambda tenths: tenths / 10))
def test_who_comes_next_begins_when_what_is_before_is_shared_out(
    replicas: list[tuple[int, float, int, float]], before_s: float
) -> None:
    backlog = Backlog.of(candidates(replicas), TOKEN_S)
    waits = [(step_s + waiting * TOKEN_S * slowness, slowness) for waiting, step_s, _, slowness in replicas]
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        done = sum(max(0.0, middle - wait_s) / slowness for wait_s, slowness in waits)
        low, high = (middle, high) if done < before_s else (low, middle)
    begins_s = max(high, min(wait_s for wait_s, _ in waits))
    last_step_s = min(backlog.step_s, begins_s + 0.5) if begins_s > 1e-9 else 0.0
    assert backlog.first_token_s(50.0, 0.5, before_s) == pytest.approx(begins_s + 0.5 + last_step_s / 2, abs=1e-6)


def candidates(replicas: list[tuple[int, float, int, float]]) -> Candidates:
    return Candidates.of(
        [
            make_row(
                f"r{number}",
                slowness=slowness,
                stats=make_stats(
                    num_waiting_tokens=waiting, step_s=step_s, num_running=8 - slots, num_waiting=0, max_num_seqs=8
                ),
            )
            for number, (waiting, step_s, slots, slowness) in enumerate(replicas)
        ]
    )


@given(st.lists(st.tuples(newcomers, st.booleans()), min_size=1, max_size=8))
def test_who_is_over_its_share_is_put_off_before_others(drawn: list[tuple[Claim, bool]]) -> None:
    """Provided that the others can all be met without it."""
    backlog = Backlog(0.0, 0.0, one_machine().levels)
    claims = [claim._replace(is_over=is_over) for claim, is_over in drawn if claim.takes_s <= claim.due_s]
    assume(are_met([claim for claim in claims if not claim.is_over], backlog))
    dates = met_together(claims, backlog)
    assert all(claim.is_over or due_s == claim.due_s for claim, due_s in zip(claims, dates, strict=True))


def test_a_date_at_its_arrival_or_before_it_is_put_off_like_others() -> None:
    """Another gateway's clock may be ahead of ours."""
    backlog = Backlog(10.0, 0.25, one_machine().levels)
    for due_s in (10.0, 9.0):
        (date_s,) = met_together([Claim((0, 0), due_s, 1.0, 10.0, 2.0)], backlog)
        assert date_s >= 11.0
