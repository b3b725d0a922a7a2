"""How many replicas: up at once, down late, never on missing data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.cluster_views import make_row, make_stats
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies.autoscaling import ScaleState, desired_replicas
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleView
from shoal_cluster.policies.view import ReplicaView

CONFIG = ScaleConfig(target_utilization=0.5, target_waiting_tokens=1000, downscale_delay_s=60.0, max_replicas=20)


def scale_view(*utilizations: float, waiting: int = 0) -> ScaleView:
    rows = [
        make_row(f"r{i}", stats=make_stats(num_free_blocks=round(100 * (1 - u)), num_waiting_tokens=waiting))
        for i, u in enumerate(utilizations)
    ]
    return ScaleView(replicas=tuple(rows), num_target=len(rows))


def count(view: ScaleView, state: ScaleState | None = None, now: float = 0.0) -> int:
    return desired_replicas(view, state or ScaleState(), CONFIG, now).num_replicas


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (scale_view(0.5), 1),
        (scale_view(0.51), 2),
        (scale_view(0.9, 0.9, 0.9), 6),
        (scale_view(0.0, waiting=5000), 5),
        (scale_view(0.9, waiting=5000), 5),
        (scale_view(*[0.9] * 20), 20),
        (ScaleView(replicas=(), num_target=0), 1),
    ],
)
def test_up_at_once_and_within_bounds(view: ScaleView, expected: int) -> None:
    assert count(view) == expected


def test_promised_tokens_count_as_waiting() -> None:
    view = scale_view(0.1)
    row = replace(view.replicas[0], num_reserved_tokens=3000)
    assert count(replace(view, replicas=(row,))) == 3


def test_down_only_after_the_delay() -> None:
    view, state = scale_view(0.1, 0.1, 0.1), ScaleState()
    for now in (0.0, 30.0, 59.0):
        decision = desired_replicas(view, state, CONFIG, now)
        assert decision.num_replicas == 3
        assert "hold" in decision.reason
        state = decision.state
    decision = desired_replicas(view, state, CONFIG, 60.0)
    assert (decision.num_replicas, decision.state) == (1, ScaleState())


def test_survivors_stay_under_target() -> None:
    """Three at 0.35 is 1.05: two would run at 0.525, over the target."""
    old = ScaleState(enough_since_s=-1000.0)
    assert count(scale_view(0.35, 0.35, 0.35), old) == 3
    assert count(scale_view(0.30, 0.30, 0.30), old) == 2


def test_a_peak_within_the_delay_keeps_its_replicas() -> None:
    state = desired_replicas(scale_view(0.1, 0.1, 0.1, 0.1), ScaleState(), CONFIG, 0.0).state
    state = desired_replicas(scale_view(0.3, 0.3, 0.3, 0.3), state, CONFIG, 30.0).state
    assert count(scale_view(0.1, 0.1, 0.1, 0.1), state, 60.0) == 3


def test_need_of_all_starts_the_delay_again() -> None:
    state = desired_replicas(scale_view(0.1, 0.1), ScaleState(), CONFIG, 0.0).state
    state = desired_replicas(scale_view(0.5, 0.5), state, CONFIG, 50.0).state
    assert count(scale_view(0.1, 0.1), state, 70.0) == 2


@pytest.mark.parametrize("change", [{"connected": False}, {"age_s": 11.0}, {"stats": None}])
def test_missing_data_never_shrinks(change: dict[str, object]) -> None:
    view = scale_view(0.1, 0.1, 0.1)
    rows = (*view.replicas[:2], replace(view.replicas[2], **change))  # type: ignore[arg-type]
    decision = desired_replicas(replace(view, replicas=rows), ScaleState(-1000.0, 1), CONFIG, 0.0)
    assert (decision.num_replicas, decision.state) == (3, ScaleState())
    assert "1 of 3 replicas do not report" in decision.reason


def test_replicas_that_start_are_not_asked_for_again() -> None:
    """One carries the load of four; three are on their way."""
    view = replace(scale_view(1.0, waiting=4000), num_target=4)
    assert count(view) == 4


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.sampled_from((0.0, 60.0)), st.booleans()), max_size=6),
    num_target=st.integers(0, 8),
    low=st.integers(1, 4),
    extra=st.integers(0, 4),
    since=st.sampled_from((None, -100.0, -10.0)),
)
def test_always_within_bounds_and_never_down_when_blind(
    rows: list[tuple[float, float, bool]], num_target: int, low: int, extra: int, since: float | None
) -> None:
    replicas: list[ReplicaView] = []
    for i, (utilization, age_s, connected) in enumerate(rows):
        stats = make_stats(num_free_blocks=round(100 * (1 - utilization)))
        replicas.append(make_row(f"r{i}", stats=stats, age_s=age_s, connected=connected))
    view = ScaleView(replicas=tuple(replicas), num_target=num_target)
    config = replace(CONFIG, min_replicas=low, max_replicas=low + extra)
    num_known = sum(1 for _, age_s, connected in rows if connected and age_s == 0.0)
    decision = desired_replicas(view, ScaleState(since), config, 0.0)
    assert low <= decision.num_replicas <= low + extra
    if num_known < num_target or since is None or since == -10.0:
        assert decision.num_replicas >= min(num_target, low + extra)
