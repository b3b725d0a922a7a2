"""What the autoscaler learns: pace, start-up time, and how it treats replicas and gateways that are silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.cluster_views import make_row, make_stats
from fixtures.scaled_world import CONFIG, PACE, World, terms
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal_cluster.policies.autoscaling import desired_replicas
from shoal_cluster.policies.autoscaling_state import ScaleState, StepCost
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView


def test_startup_is_measured() -> None:
    world = World(num_running=1, target=1, startup_s=12.0)
    world.run(4.0, 60)
    assert world.state.startup_s == pytest.approx(12.0, abs=1.0)


def test_a_clock_that_goes_back_forgets_and_goes_on() -> None:
    world = World()
    world.run(2.0, 100)
    world.now -= 50
    world.run(2.0, 5)
    assert len(world.state.samples) <= 6


@pytest.mark.parametrize("gap", ["the clock is set forward", "nobody looks"])
def test_time_in_which_nobody_looked_makes_no_step_down(gap: str) -> None:
    world = World(num_running=8, target=8, config=replace(CONFIG, downscale_delay_s=300.0))
    world.run(6.0, 400)
    before = world.target
    if gap == "nobody looks":
        world.look(6.0, 400.0)
    else:
        world.run(0.5, 5)
        world.now += 600.0
    world.run(0.5, 290)
    assert world.target == before, "it has been quiet for less than the delay, as far as was seen"
    world.run(0.5, 30)
    assert world.target < before


def starting() -> World:
    """A world in which replicas have been asked for that have not come up yet."""
    world = World(now=10_000.0, num_running=1, target=1, startup_s=None)
    world.run(6.0, 10)
    assert world.state.pending_s
    return world


def test_a_clock_that_is_set_forward_during_a_start_makes_it_no_longer() -> None:
    world = starting()
    world.now += 3600.0
    world.run(6.0, 10)
    world.num_running = world.target
    world.look(6.0)
    assert world.state.startup_s is not None
    assert 10.0 < world.state.startup_s <= 20.0, "the hour is no part of it"


def test_a_start_that_nobody_saw_end_teaches_nothing() -> None:
    world = starting()
    world.num_running = world.target
    world.look(6.0, 400.0)
    assert world.state.startup_s is None


def test_a_start_while_a_gateway_is_silent_takes_as_long_as_it_takes() -> None:
    world = World(num_running=1, target=1, startup_s=None)
    world.run(6.0, 10)
    world.is_heard = False
    world.run(6.0, 50)
    world.is_heard = True
    world.run(6.0, 2)
    world.num_running = world.target
    world.look(6.0)
    assert world.state.startup_s is not None
    assert world.state.startup_s > 50.0


def times_s(state: ScaleState) -> list[float]:
    """Every time that the state keeps."""
    pairs = [time_s for time_s, _ in (*state.needs, *state.offered, *state.left)]
    known = [s.time_s for s in (*state.samples, *state.progress.values())]
    return [*pairs, *known, *state.pending_s, *(t for t in (state.seen_since_s, state.last_down_s) if t is not None)]


def test_a_clock_that_goes_back_does_not_put_off_the_next_step_down() -> None:
    world = World(now=10_000.0, config=replace(CONFIG, burst_memory_s=100.0))
    world.run(8.0, 100)
    while world.state.last_down_s is None:
        world.look(3.0)
    before = world.target
    world.now -= 3600.0
    world.look(3.0)
    assert world.state.offered, "what the load has been lately may come again"
    assert max(times_s(world.state)) <= world.now
    world.run(0.5, 200)
    assert world.target < before


def test_a_clock_that_goes_back_during_a_start_makes_it_no_shorter_than_nothing() -> None:
    world = starting()
    world.now -= 3600.0
    world.run(6.0, 5)
    world.num_running = world.target
    world.look(6.0)
    assert world.state.startup_s == pytest.approx(5.0, abs=1.0), "since it was first known to start"


@given(base_s=st.floats(0.001, 0.1), token_s=st.floats(1e-5, 1e-2), data=st.data())
def test_costs_are_found_in_what_replicas_did(base_s: float, token_s: float, data: st.DataObject) -> None:
    cost = StepCost()
    for steps, tokens in data.draw(
        st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5000)), min_size=5, max_size=20, unique=True)
    ):
        cost = cost.add(steps, tokens, base_s * steps + token_s * tokens)
    pace = cost.tokens_per_s(512)
    assume(cost.steps_steps * cost.tokens_tokens > 1.01 * cost.steps_tokens**2)
    assert pace == pytest.approx(512 / (base_s + 512 * token_s), rel=1e-3)


def test_the_pace_of_a_new_replica_is_learnt_from_the_first_look() -> None:
    world = World(num_running=1, target=1)
    assert terms(world.look(4.0))["replica_tokens_per_s"] == pytest.approx(PACE, rel=0.1)


def test_steps_that_compute_no_prompt_do_not_put_off_the_first_idea_of_the_pace() -> None:
    state = ScaleState()
    for now, tokens in ((1, 0), (2, 0), (3, 600)):
        stats = make_stats(num_steps=10 * now, busy_s=float(now), num_prompt_tokens=tokens)
        view = ScaleView(replicas=(make_row("r", stats=stats),), num_target=1, demand=Demand(num_requests=now))
        state = desired_replicas(view, state, CONFIG, float(now)).state
        assert (state.cost.tokens_per_s(256) is not None) == (tokens > 0)


def test_what_a_replica_did_long_before_it_was_first_seen_counts_for_nothing() -> None:
    """As after a restart of the controller: the totals of days would outweigh everything that follows."""
    stats = make_stats(num_steps=10**6, busy_s=1e5, num_prompt_tokens=10**8, num_finished=10**5)
    view = ScaleView(replicas=(make_row("r", stats=stats),), num_target=1, demand=Demand(num_requests=10**5))
    state = desired_replicas(view, ScaleState(), CONFIG, 1.0).state
    assert state.cost == StepCost()
    assert state.samples[-1].num_finished == 0


def test_a_gateway_that_is_heard_again_is_no_burst() -> None:
    """Nor is a restart of the controller, after which the first reports are totals of days."""
    world = World()
    world.run(2.0, 600)
    before = world.target
    for forgotten in (world.state, ScaleState()):
        world.state = forgotten
        world.is_heard = False
        assert world.run(2.0, 15).reason == "hold: a gateway does not report"
        world.is_heard = True
        world.run(2.0, 60)
        assert set(world.counts()[-75:]) == {before}
        assert terms(world.decisions[-1])["requests_per_s"] == pytest.approx(2.0, abs=0.1)


def test_a_gateway_that_is_replaced_takes_its_long_prompts_out_of_the_totals() -> None:
    """The requests of the one that goes on outnumber those that are no longer counted."""
    state, target = ScaleState(), 2
    for now in range(600):
        gone, here = (now // 10 if now < 300 else 0), 4 * now
        demand = Demand(num_requests=gone + here, num_prompt_tokens=20_000 * gone + 100 * here)
        is_silent = 300 <= now < 308
        did = {"num_prompt_tokens": 1200 * now, "num_finished": 2 * now, "num_steps": 20 * now, "busy_s": 0.3 * now}
        rows = tuple(make_row(f"r{number}", stats=make_stats(num_running=2, **did)) for number in range(2))
        view = ScaleView(replicas=rows, num_target=target, demand=None if is_silent else demand)
        decision = desired_replicas(view, state, CONFIG, float(now))
        state, target = decision.state, decision.num_replicas
    assert terms(decision)["requests_per_s"] == pytest.approx(4.0, abs=0.1)


def test_what_replicas_hold_counts_while_a_gateway_is_silent() -> None:
    world = World()
    world.run(1.0, 100)
    world.is_heard = False
    assert world.run(19.0, 5).num_replicas > 2


def test_nobody_has_reported_yet_is_no_reason_to_leave_zero() -> None:
    config = replace(CONFIG, min_replicas=0)
    state = ScaleState()
    for now in range(5):
        view = ScaleView(replicas=(), num_target=0, demand=None)
        decision = desired_replicas(view, state, config, float(now))
        state = decision.state
        assert decision.num_replicas == 0
    state = desired_replicas(replace(view, demand=Demand()), state, config, 5.0).state
    assert desired_replicas(replace(view, demand=Demand(num_requests=1, num_held=1)), state, config, 6.0).num_replicas
    assert desired_replicas(view, state, config, 6.0).num_replicas == 1, "of those who reported one may hold requests"
