"""Prompts that begin alike and are there at one time: what they share is computed once, and nobody waits in vain."""

from __future__ import annotations

import pytest

from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, StepResult
from shoal_replica.scheduler import Scheduler
from shoal_replica.testing import make_request

WHOLE_STEP = 64


def make_scheduler(*, enable_prefix_caching: bool = True) -> Scheduler:
    cache = CacheConfig(num_blocks=256, block_size=4, enable_prefix_caching=enable_prefix_caching)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=WHOLE_STEP, policy="deadline")
    return Scheduler(config, cache, 600, ())


def step(scheduler: Scheduler) -> dict[int, int]:
    """Tokens that it computes, by sequence."""
    output = scheduler.schedule(0.0)
    assert output is not None
    scheduler.update(output, StepResult(tuple(SampledToken(s.seq_id, 7) for s in output.scheduled if s.samples)))
    scheduler.check_invariants()
    return {s.seq_id: s.num_new_tokens for s in output.scheduled}


def prompt(shared: int, own: int, who: int) -> list[int]:
    return [*range(shared), *range(1000 * who, 1000 * who + own)]


def run(scheduler: Scheduler) -> int:
    """Tokens of all that is left."""
    num_tokens = 0
    while scheduler.has_work:
        num_tokens += sum(step(scheduler).values())
    return num_tokens


def test_who_is_due_sooner_waits_for_the_prompt_that_computes_its_beginning() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("turn", prompt(200, 0, 1), max_tokens=1, due_s=9.0))
    assert step(scheduler) == {0: 64}
    scheduler.add(make_request("next turn", prompt(200, 20, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {0: 64}
    assert step(scheduler) == {0: 64}
    assert step(scheduler) == {0: 8}
    assert step(scheduler) == {1: 20}
    assert scheduler.stats(0.0).num_cached_tokens == 200


def test_the_other_goes_in_the_place_of_who_waits_for_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("turn", prompt(200, 0, 1), max_tokens=1, due_s=9.0))
    assert step(scheduler) == {0: 64}
    scheduler.add(make_request("another", prompt(0, 100, 3), max_tokens=1, due_s=5.0))
    assert step(scheduler) == {1: 64}
    scheduler.add(make_request("next turn", prompt(200, 20, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {0: 64}
    assert step(scheduler) == {0: 64}
    assert step(scheduler) == {0: 8, 1: 36}
    assert step(scheduler) == {2: 20}


def test_it_goes_first_again_as_soon_as_it_shares_nothing_more() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("document", prompt(128, 400, 1), max_tokens=1, due_s=9.0))
    assert step(scheduler) == {0: 64}
    scheduler.add(make_request("question", prompt(128, 10, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {0: 64}
    assert step(scheduler) == {1: 10, 0: 54}


def test_nothing_is_computed_twice_of_what_several_share() -> None:
    scheduler = make_scheduler()
    for who in range(1, 7):
        scheduler.add(make_request(f"r{who}", prompt(200, 12, who), max_tokens=1, due_s=10.0 - who))
        step(scheduler)
    run(scheduler)
    assert scheduler.stats(0.0).num_cached_tokens == 5 * 200


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_nobody_waits_for_who_has_gone(end: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("turn", prompt(200, 0, 1), max_tokens=1, due_s=9.0))
    step(scheduler)
    scheduler.add(make_request("next turn", prompt(200, 20, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {0: 64}
    if end == "abort":
        scheduler.abort("turn")
        assert step(scheduler) == {1: 64}
        assert scheduler.stats(0.0).num_cached_tokens == 128
    assert run(scheduler) == {"abort": 28, "finish": 72 + 20}[end]


def test_few_tokens_are_not_waited_for() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("turn", prompt(64 + 4, 0, 1), max_tokens=1, due_s=9.0))
    step(scheduler)
    scheduler.add(make_request("next turn", prompt(64 + 4, 40, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {1: 44, 0: 4}  # 4 of 44 are shared


def test_a_prompt_in_pieces_holds_nobody_up() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("heavy", prompt(200, 0, 1), max_tokens=1, due_s=9.0, yields=True))
    (num_first,) = step(scheduler).values()
    assert num_first < WHOLE_STEP
    scheduler.add(make_request("light", prompt(200, 20, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {1: 64}


def test_without_a_cache_everybody_computes_all() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(make_request("turn", prompt(200, 0, 1), max_tokens=1, due_s=9.0))
    step(scheduler)
    scheduler.add(make_request("next turn", prompt(200, 20, 2), max_tokens=1, due_s=1.0))
    assert step(scheduler) == {1: 64}
    assert run(scheduler) == 420 - 128
