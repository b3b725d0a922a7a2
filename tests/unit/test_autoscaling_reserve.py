"""Replicas held ready for a jump in load: bounded by the settings, remembered for as long as they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fixtures.cluster_views import make_row, make_stats
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.policies.autoscaling import desired_replicas
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_reserve import MEMORY_PARTS, remember_offered, reserve
from shoal_cluster.policies.autoscaling_state import ScaleDecision, ScaleState
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView

CONFIG = ScaleConfig(max_replicas=100, headroom=5.0, burst_memory_s=600.0, downscale_delay_s=60.0)
TOKENS, PACE = 500, 1000  # per prompt; prompt tokens that a replica computes per second


def test_headroom_shrinks_in_proportion_as_the_load_grows() -> None:
    for offered, held in ((0.0, 0.0), (1.0, 6.0), (4.0, 14.0), (100.0, 150.0)):
        assert reserve(offered, ScaleState(), CONFIG) == held
    assert reserve(7.0, ScaleState(), replace(CONFIG, headroom=0.0)) == 7.0


def test_a_peak_is_held_ready_until_it_is_forgotten() -> None:
    state = ScaleState(offered=remember_offered(40.0, ScaleState(), CONFIG, 1000.0))
    for now, before in ((1001.0, 40.0), (1599.0, 40.0), (1601.0, 0.1)):
        state = replace(state, offered=remember_offered(0.1, state, CONFIG, now))
        assert reserve(0.1, state, CONFIG) == pytest.approx(max(before, 0.1 + 5 * math.sqrt(0.1)))
    assert remember_offered(40.0, state, replace(CONFIG, burst_memory_s=0.0), 1602.0) == ()


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.floats(0.0, 100.0)), max_size=300))
def test_memory_is_bounded_and_never_forgets_a_higher_peak_early(steps: list[tuple[float, float]]) -> None:
    state, now, seen = ScaleState(), 0.0, []
    for gap_s, offered in steps:
        now += gap_s
        seen.append((now, offered))
        state = replace(state, offered=remember_offered(offered, state, CONFIG, now))
        values = [n for _, n in state.offered]
        assert values == sorted(values, reverse=True)
        assert len(values) <= MEMORY_PARTS + 2
        grain_s = CONFIG.burst_memory_s / MEMORY_PARTS
        sure = [n for t, n in seen if now - t < CONFIG.burst_memory_s - grain_s]
        assert values[0] >= max(sure, default=0.0)


class Story:
    """A cluster whose replicas start instantly, looked at once a second."""

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self.state = ScaleState()
        self.target = 1
        self.now = 1000.0
        self.requests = 0.0
        self.done = 0.0  # requests done by each replica

    def run(self, rate: float, seconds: int) -> ScaleDecision:
        for _ in range(seconds):
            self.now += 1
            self.requests += rate
            self.done += rate / max(1, self.target)
            stats = make_stats(
                num_steps=int(self.done * TOKENS / 256),
                num_prompt_tokens=int(self.done * TOKENS),
                num_finished=int(self.done),
                num_running=round(rate / max(1, self.target)),
                busy_s=self.done * TOKENS / PACE,
            )
            rows = tuple(make_row(f"r{i}", stats=stats) for i in range(self.target))
            demand = Demand(num_requests=int(self.requests), num_prompt_tokens=int(self.requests) * TOKENS)
            view = ScaleView(replicas=rows, num_target=self.target, demand=demand)
            decision = desired_replicas(view, self.state, self.config, self.now)
            self.state, self.target = decision.state, decision.num_replicas
        return decision


def test_a_new_load_gets_its_reserve_within_three_seconds() -> None:
    """4 requests/s of 500 tokens fill 2 replicas, and count as filling 4 until it is known what outputs take."""
    story = Story(CONFIG)
    assert story.run(4.0, 4).num_replicas >= 8
    assert story.run(4.0, 150).num_replicas >= 2 + 5 * math.sqrt(2) - 1
    assert dict(story.run(4.0, 1).terms)["needed_for_reserve"] > 0


def test_a_load_that_fell_leaves_its_peak_ready_and_then_goes() -> None:
    story = Story(CONFIG)
    peak = story.run(20.0, 100).num_replicas  # prompts fill ten, and decodes need more
    assert peak >= 10 + 5 * math.sqrt(10)
    assert 10 <= story.run(0.2, 400).num_replicas <= 20
    assert story.run(0.2, 500).num_replicas < 5


def test_a_load_that_ended_leaves_its_peak_ready_and_then_goes() -> None:
    story = Story(CONFIG)
    story.run(20.0, 100)
    assert story.run(0.0, 400).num_replicas >= 10
    assert story.run(0.0, 600).num_replicas == 1


def test_a_minimum_of_zero_lets_an_idle_cluster_go_whatever_it_remembers() -> None:
    story = Story(replace(CONFIG, min_replicas=0))
    story.run(20.0, 100)
    assert story.run(0.0, 300).num_replicas == 0
    assert story.state.offered
