"""How many replicas are wanted: up at once, down late, and never down on missing data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fixtures.cluster_views import make_row, make_stats
from fixtures.scaled_world import CONFIG, PACE, World, terms
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shoal_cluster.policies.autoscaling import desired_replicas
from shoal_cluster.policies.autoscaling_config import Schedule
from shoal_cluster.policies.autoscaling_need import replica_rate
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView


def test_steady_load_gets_what_it_needs_at_the_target() -> None:
    """4 requests/s of 500 tokens take 2 replicas' compute and 0.4 of one's blocks: 2 / 0.5, plus the longer decodes."""
    world = World(num_running=1, target=1)
    decision = world.run(4.0, 300)
    assert terms(decision)["needed_for_compute"] == pytest.approx(4.0, rel=0.1)
    assert decision.num_replicas in (4, 5)
    assert world.counts() == sorted(world.counts())


def test_a_burst_is_answered_within_two_seconds_and_by_several_at_once() -> None:
    world = World()
    world.run(1.0, 200)
    before = world.target
    decision = world.run(20.0, 2)
    assert decision.num_replicas >= before + 5
    assert decision.reason.startswith("up: ")


def test_a_lone_pair_of_requests_is_no_burst() -> None:
    world = World()
    world.run(1.0, 200)
    assert world.look(3.0).num_replicas == world.target == 2


def test_a_lasting_rise_is_met_ahead_of_time() -> None:
    world = World(num_running=4, target=4, startup_s=60.0)
    for second in range(300):
        decision = world.look(2.0 + 0.05 * second)
    assert terms(decision)["requests_per_s_ahead"] > terms(decision)["requests_per_s"] + 1.0


def test_a_step_is_not_taken_for_a_slope() -> None:
    world = World(num_running=20, target=20)
    world.run(2.0, 150)
    seen = [terms(world.look(8.0))["requests_per_s_ahead"] for _ in range(120)]
    assert max(seen) < 8.0 * 1.15


def test_a_queue_over_the_objective_asks_for_more_if_they_would_come_in_time() -> None:
    world = World()
    world.run(1.0, 100)
    calm = world.target
    world.waiting = 10 * PACE  # tokens at each replica: worked off before another one could help
    decision = world.look(1.0)
    assert terms(decision)["predicted_ttft_s"] > CONFIG.ttft_objective_s
    assert decision.num_replicas == calm
    world.waiting = 100 * PACE
    assert world.look(1.0).num_replicas > calm


def test_shed_requests_ask_for_one_more_and_not_for_one_each_second() -> None:
    world = World(startup_s=None, config=replace(CONFIG, min_replicas=2))
    world.run(0.1, 100)
    world.shed = 3
    assert world.look(0.1).num_replicas == 3
    world.shed = 6
    assert world.look(0.1).num_replicas == 3


def test_replicas_that_start_are_not_asked_for_again() -> None:
    world = World(num_running=1, target=1, startup_s=30.0)
    world.run(1.0, 100)
    world.run(8.0, 10)
    asked = world.target
    assert world.run(8.0, 15).num_replicas <= asked + 1


def test_a_replica_that_never_starts_blocks_no_decision() -> None:
    world = World(num_running=2, target=2, startup_s=None)
    world.run(6.0, 30)
    stuck = world.target
    assert stuck > 2
    world.run(6.0, 300)
    assert terms(world.decisions[-1])["stuck_s"] > 100
    assert world.run(12.0, 20).num_replicas > stuck
    assert world.run(0.1, 400).num_replicas < stuck


def test_down_only_after_the_delay_then_in_few_steps() -> None:
    world = World(num_running=8, target=8)
    world.run(6.0, 100)
    high = world.target
    world.run(0.5, 59)
    assert world.target == high
    world.run(0.5, 150)
    assert world.target <= 2
    assert len(set(world.counts()[-209:])) <= 4


def test_a_peak_within_the_delay_keeps_its_replicas() -> None:
    world = World(num_running=10, target=10, config=replace(CONFIG, downscale_delay_s=300.0))
    world.run(1.0, 200)
    peak = int(max(terms(world.look(5.0))["needed_with_slack"] for _ in range(60)))
    world.run(1.0, 200)
    assert world.target == peak > 2


def test_what_was_given_up_is_not_taken_back_for_a_hair() -> None:
    world = World(num_running=10, target=10)
    world.run(2.0, 200)
    low = world.target
    assert low < 10
    assert world.run(2.3, 60).num_replicas == low


def test_going_up_soon_after_going_down_makes_patient() -> None:
    world = World(num_running=10, target=10)
    world.run(2.0, 120)
    assert world.target < 10
    world.run(12.0, 30)
    assert world.state.patience == 2


def test_going_up_again_after_lower_bounds_makes_no_more_patient() -> None:
    world = World(num_running=8, target=8)
    world.run(6.0, 200)
    world.config = replace(CONFIG, max_replicas=3)
    world.run(6.0, 3)
    assert world.target == 3
    world.config = CONFIG
    world.run(6.0, 3)
    assert world.target > 3
    assert world.state.patience == 1


@pytest.mark.parametrize("change", [{"connected": False}, {"age_s": 11.0}, {"stats": None}])
def test_missing_data_never_shrinks(change: dict[str, object]) -> None:
    world = World(num_running=5, target=5)
    world.run(0.5, 50)
    rows = world.rows(0.5)
    blind = (*rows[:-1], replace(rows[-1], **change))  # type: ignore[arg-type]
    state = world.state
    for second in range(300):
        view = ScaleView(replicas=blind, num_target=5, demand=Demand(num_requests=int(world.requests)))
        decision = desired_replicas(view, state, CONFIG, world.now + second)
        state = decision.state
        assert decision.num_replicas == 5
    assert decision.reason == "hold: 1 of 5 replicas does not report"


def test_a_silent_gateway_never_shrinks() -> None:
    world = World(num_running=5, target=5)
    world.run(0.5, 50)
    state = world.state
    for second in range(300):
        view = ScaleView(replicas=world.rows(0.5), num_target=5, demand=None)
        decision = desired_replicas(view, state, CONFIG, world.now + second)
        state = decision.state
    assert (decision.num_replicas, decision.reason) == (5, "hold: a gateway does not report")


def test_a_cluster_that_nobody_sees_is_not_taken_for_idle() -> None:
    """As after a restart of the controller: five replicas are wanted, and none is known yet."""
    state = ScaleState()
    for now in range(400):
        decision = desired_replicas(ScaleView(replicas=(), num_target=5, demand=Demand()), state, CONFIG, float(now))
        state = decision.state
    assert decision.num_replicas == 5


def test_survivors_must_hold_what_all_hold_now() -> None:
    """By the arrival rate one replica is enough, but long sequences hold 60 % of the blocks of each of the three."""
    config = replace(CONFIG, downscale_delay_s=5.0)
    state = ScaleState()
    rows = tuple(make_row(f"r{i}", stats=make_stats(num_free_blocks=40, num_running=1)) for i in range(3))
    small = tuple(replace(row, stats=make_stats(num_free_blocks=100)) for row in rows)
    for now in range(30):
        seen = rows if now == 29 else small
        view = ScaleView(replicas=seen, num_target=3, demand=Demand(num_requests=now // 10))
        decision = desired_replicas(view, state, config, float(now))
        if now < 29:
            state = replace(decision.state, last_down_s=None)
    assert decision.num_replicas == 3


def test_survivors_must_hold_what_a_replica_that_drains_still_holds() -> None:
    """It reports, so it puts off no step down; but its answers go to the others, which have no room for them."""
    config = replace(CONFIG, downscale_delay_s=5.0)
    for num_free_blocks, expected in ((10, 3), (100, 1)):
        drains = structs.replace(make_stats(num_free_blocks=num_free_blocks, num_running=1), draining=True)
        others = make_stats(num_free_blocks=90)
        rows = tuple(make_row(f"r{i}", stats=drains if i == 0 else others) for i in range(3))
        state = ScaleState()
        for now in range(40):
            view = ScaleView(replicas=rows, num_target=3, demand=Demand(num_requests=now // 10))
            decision = desired_replicas(view, state, config, float(now))
            state = replace(decision.state, last_down_s=None)
        assert decision.num_replicas == expected, decision.reason


def test_idle_goes_to_zero_one_by_one_only_if_allowed() -> None:
    world = World(num_running=2, target=2, config=replace(CONFIG, min_replicas=0))
    world.run(1.0, 30)
    world.run(0.0, 300)
    assert world.target == 0
    assert 1 in world.counts()
    kept = World(num_running=2, target=2)
    kept.run(0.0, 300)
    assert kept.target == 1


def test_held_requests_wake_a_cluster_at_zero_with_as_many_as_they_need() -> None:
    world = World(num_running=2, target=2, config=replace(CONFIG, min_replicas=0))
    world.run(2.0, 200)
    world.run(0.0, 300)
    assert world.target == 0
    world.held = 1
    assert world.look(1.0).num_replicas == 1
    world.held = 200
    assert world.look(0.0).num_replicas > 2


def test_bounds_and_schedules() -> None:
    config = replace(CONFIG, min_replicas=2, max_replicas=6)
    world = World(num_running=2, target=2, config=config)
    assert world.run(50.0, 30).num_replicas == 6
    assert "from 2 to 6 replicas are allowed" in world.decisions[-1].reason
    noon = replace(config, schedules=(Schedule(cron="0 12 * * *", duration_s=3600, min_replicas=5),))
    for time_s, expected in ((11.9 * 3600, 2), (12 * 3600 - 20, 5), (12.5 * 3600, 5), (13.01 * 3600, 2)):
        view = ScaleView(replicas=world.rows(0.0)[:2], num_target=2, demand=Demand())
        decision = desired_replicas(view, ScaleState(), noon, time_s)
        assert decision.num_replicas == expected
    assert "by schedule" in desired_replicas(view, ScaleState(), noon, 12.5 * 3600).reason


def test_lower_bounds_take_replicas_away_at_once() -> None:
    world = World(num_running=5, target=5, config=replace(CONFIG, max_replicas=3))
    decision = world.look(1.0)
    assert decision.num_replicas == 3
    assert decision.reason.startswith("down: from 1 to 3 replicas are allowed")


def test_a_full_replica_shares_its_time() -> None:
    """Prompts alone would allow 2 requests/s; decodes take part of the time, so it serves fewer."""
    world = World(num_running=4, target=4)
    world.run(2.0, 200)
    from shoal_cluster.policies.autoscaling_need import measure

    view = ScaleView(replicas=world.rows(2.0), num_target=4, demand=Demand(num_requests=int(world.requests)))
    load = measure(view, world.state, CONFIG, world.now)
    alone = load.num_uncached_tokens / (load.replica_tokens_per_s or math.nan)
    assert (replica_rate(load, world.state) or math.nan) < 1 / alone


@settings(max_examples=60)
@given(data=st.data())
def test_always_within_bounds_and_never_down_when_blind(data: st.DataObject) -> None:
    low = data.draw(st.integers(0, 3))
    config = replace(CONFIG, min_replicas=low, max_replicas=low + data.draw(st.integers(1, 8)), downscale_delay_s=5.0)
    start = data.draw(st.integers(config.min_replicas, config.max_replicas))
    world = World(num_running=start, target=start, config=config)
    for _ in range(data.draw(st.integers(1, 6))):
        rate = data.draw(st.sampled_from((0.0, 0.3, 2.0, 30.0)))
        world.silent = data.draw(st.integers(0, world.num_running))
        world.waiting = data.draw(st.sampled_from((0, 0, 50_000)))
        for _ in range(data.draw(st.integers(1, 20))):
            before, silent = world.target, min(world.silent, world.num_running)
            decision = world.look(rate)
            assert config.min_replicas <= decision.num_replicas <= config.max_replicas
            assert decision.reason.split(":")[0] in ("up", "down", "hold")
            assert ("up", "down", "hold")[
                0 if world.target > before else 1 if world.target < before else 2
            ] == decision.reason.split(":")[0]
            if silent:
                assert world.target >= before
            assert all(math.isfinite(value) for _, value in decision.terms)


def test_a_step_down_that_saves_little_waits_three_times_as_long() -> None:
    world = World(num_running=30, target=30)
    world.run(16.0, 250)
    before = world.target
    assert 10 < before < 30
    world.run(16.0 * (before - 1.6) / before, 150)
    assert world.target == before
    world.run(16.0 * (before - 1.6) / before, 150)
    assert world.target == before - 1


@pytest.mark.parametrize(("left_s", "is_beyond"), [(100.0, True), (300.0, True), (301.0, False)])
def test_what_was_given_up_lately_is_asked_for_with_one_more(left_s: float, is_beyond: bool) -> None:
    world = World()
    world.run(1.0, 200)
    needed = replace(world, asked=[], decisions=[]).look(20.0).num_replicas
    assert needed > world.target
    world.state = replace(world.state, left=((world.now + 1 - left_s, needed),))
    highest = replace(world, config=replace(world.config, max_replicas=needed), asked=[], decisions=[])
    decision = world.look(20.0)
    assert decision.num_replicas == needed + is_beyond
    assert ("were given up less than 300 s ago" in decision.reason) == is_beyond
    assert highest.look(20.0).num_replicas == needed, "the most that is allowed is never put off"


def test_a_rise_that_is_more_than_a_hair_is_met_at_once_at_the_plain_target() -> None:
    world = World(num_running=10, target=10)
    world.run(2.0, 200)
    assert world.state.last_down_s is not None
    world.look(12.0)
    after = world.target
    assert after > 5
    assert world.look(0.0).num_replicas == after


def test_a_replaced_gateway_whose_total_the_others_have_made_up_is_no_shedding() -> None:
    world = World(config=replace(CONFIG, min_replicas=2))
    world.shed = 3
    world.run(0.1, 100)
    before = world.target
    world.shed = 0  # its refusals are gone with it, and the others' requests make up for its own
    assert world.look(0.1).num_replicas == before
