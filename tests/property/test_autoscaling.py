"""The autoscaler over random loads: it returns to no count that it gave up, and delays no replica that is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from fixtures.scaled_world import CONFIG, World
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies.autoscaling import REGRET_S
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.sim.scaling_run import num_returns

PLAIN = replace(CONFIG, max_replicas=40, target_utilization=0.7, downscale_delay_s=REGRET_S)
READY = replace(PLAIN, headroom=5.0, burst_memory_s=300.0)
LOOKS = 400


def rates(rng: Random) -> Iterator[float]:
    """Requests a second at each look: levels that last a while with noise on them, steps of any size, slopes."""
    level, slope = rng.uniform(0, 10), 0.0
    while True:
        if rng.random() < 0.02:
            level, slope = rng.choice((level * rng.uniform(0.5, 2), rng.uniform(0, 20), 0.0)), 0.0
        elif rng.random() < 0.02:
            slope = rng.uniform(-0.2, 0.2)
        level = min(20.0, max(0.0, level + slope))
        yield max(0.0, level + rng.gauss(0, 0.5) * math.sqrt(level))


@pytest.mark.parametrize("config", [PLAIN, READY])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), low=st.integers(0, 2), startup_s=st.sampled_from((5.0, 30.0, 120.0, None)))
def test_no_count_is_returned_to_and_nothing_needed_is_put_off(
    config: ScaleConfig, seed: int, low: int, startup_s: float | None
) -> None:
    """About an hour of any load. Only from 0 and to the maximum may the count return to one that it left lately."""
    rng = Random(seed)
    config = replace(config, min_replicas=low)
    world = World(num_running=2, target=2, config=config, startup_s=startup_s)
    changes = [(world.now, world.target)]
    for rate, _ in zip(rates(rng), range(LOOKS), strict=False):
        before = world.target
        world.waiting = rng.choice((0, 0, 0, 0, 0, 0, 0, 5_000))
        decision = world.look(rate, rng.choice((1.0, 2.0, 10.0, 25.0)))
        asked = max((math.ceil(n - 1e-9) for name, n in decision.terms if name.startswith("needed_for_")), default=0)
        if asked > before:
            assert world.target >= min(asked, config.max_replicas)
        if world.target == before:
            continue
        if before == 0 or world.target == config.max_replicas:
            changes = []  # what is left here may be needed again at once
        changes.append((world.now, world.target))
    assert num_returns(changes) == 0
