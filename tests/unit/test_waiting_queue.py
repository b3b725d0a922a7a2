"""What waits in a replica's queue, counted in tokens that are left to compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, StepResult
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.scheduler import Scheduler
from shoal_replica.shared_prefix import num_common_blocks
from shoal_replica.testing import make_request


def make_scheduler(*, enable_prefix_caching: bool = True) -> Scheduler:
    cache = CacheConfig(num_blocks=64, block_size=4, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=256), cache, 200, ())


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule(0.0)
    assert output is not None
    scheduler.update(output, StepResult(tuple(SampledToken(s.seq_id, 7) for s in output.scheduled if s.samples)))
    scheduler.check_invariants()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_common_blocks_are_those_before_the_first_difference(common: int, left: int, right: int) -> None:
    shared = list(range(4 * common))
    one = hash_blocks([*shared, *range(1000, 1000 + 4 * left)], 4)
    two = hash_blocks([*shared, *range(2000, 2000 + 4 * right)], 4)
    assert num_common_blocks(one, two) == common


def test_a_cached_prefix_is_not_waited_for() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", range(41), max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("second", [*range(40), *range(100, 110)]))
    assert scheduler.stats(0.0).num_waiting_tokens == 10
    scheduler.check_invariants()


def test_a_prefix_that_another_computes_first_is_counted_once() -> None:
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.add(make_request(f"r{number}", [*range(40), 100 + number, 200 + number]))
    assert scheduler.stats(0.0).num_waiting_tokens == 42 + 2 + 2
    step(scheduler)
    assert (scheduler.stats(0.0).num_running, scheduler.stats(0.0).num_waiting_tokens) == (1, 1 + 2 + 2)
    scheduler.abort("r1")
    assert scheduler.stats(0.0).num_waiting_tokens == 1 + 2
    scheduler.check_invariants()


@pytest.mark.parametrize("number", [1, 2])
def test_without_a_prefix_cache_every_token_waits(number: int) -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for i in range(number):
        scheduler.add(make_request(f"r{i}", range(40)))
    assert scheduler.stats(0.0).num_waiting_tokens == 40 * number
