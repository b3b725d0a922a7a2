"""What the needs are worked out from: what waits, and how fast requests arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.scaled_world import CONFIG, PACE, World, terms

from shoal_cluster.policies.autoscaling_state import ScaleState

LONG_S = 3 * 120  # three times as long as arrivals are remembered


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_waits_keeps_its_replicas_however_long_ago_it_arrived(is_restarted: bool) -> None:
    world = World()
    world.run(4.0, 100)
    before = world.target
    world.held = 10_000
    if is_restarted:
        world.state = ScaleState()
    for _ in range(LONG_S):
        world.tokens_done += PACE  # the replicas are at it
        decision = world.look(0.0)
    assert terms(decision)["needed_for_queue"] > 1
    assert terms(decision)["predicted_ttft_s"] > CONFIG.ttft_objective_s
    assert min(world.counts()[-LONG_S:]) >= before


def test_a_cluster_in_which_nothing_waits_or_arrives_has_no_queue() -> None:
    world = World()
    world.run(4.0, 100)
    assert "needed_for_queue" not in terms(world.run(0.0, LONG_S))
    assert world.target == 1


@pytest.mark.parametrize("burst_window_s", [1.0, 5.0, 21.0, 41.0, 60.0])
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_a_steady_rate_is_read_as_it_is_whatever_the_window_for_bursts(rate: float, burst_window_s: float) -> None:
    world = World(config=replace(CONFIG, burst_window_s=burst_window_s))
    world.run(rate, 200)
    seen = [terms(world.look(rate))["requests_per_s"] for _ in range(40)]
    assert sum(seen) / len(seen) == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("burst_window_s", [1.0, 5.0, 21.0, 41.0, 60.0])
def test_a_lasting_rise_is_met_ahead_of_time_whatever_the_window_for_bursts(burst_window_s: float) -> None:
    world = World(num_running=4, target=4, startup_s=60.0, config=replace(CONFIG, burst_window_s=burst_window_s))
    for second in range(300):
        decision = world.look(2.0 + 0.05 * second)
    assert terms(decision)["requests_per_s_ahead"] > terms(decision)["requests_per_s"] + 1.0
