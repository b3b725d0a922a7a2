"""Prompts with a common prefix that are present at one time: it is computed once, and no request waits in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, StepResult
from shoal_replica.kv_cache import Cached, KVCacheManager
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.scheduler import Scheduler
from shoal_replica.testing import make_request
from shoal_replica.waiting_line import WaitingLine

WHOLE_STEP = 64


def make_scheduler(
    *, enable_prefix_caching: bool = True, num_blocks: int = 256, max_num_seqs: int = 8, policy: str = "deadline"
) -> Scheduler:
    cache = CacheConfig(num_blocks=num_blocks, block_size=4, enable_prefix_caching=enable_prefix_caching)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=WHOLE_STEP, policy=policy)
    return Scheduler(config, cache, min(800, 4 * num_blocks), ())


def step(scheduler: Scheduler) -> dict[int, int]:
    """Run a step; returns how many tokens it computes, by sequence."""
    output = scheduler.schedule(0.0)
    assert output is not None
    scheduler.update(output, StepResult(tuple(SampledToken(s.seq_id, 7) for s in output.scheduled if s.samples)))
    scheduler.check_invariants()
    return {s.seq_id: s.num_new_tokens for s in output.scheduled}


def prompt(shared: int, own: int, who: int) -> list[int]:
    return [*range(shared), *range(1000 * who, 1000 * who + own)]


def run(scheduler: Scheduler) -> int:
    """Run all that is left; returns how many tokens are computed."""
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
    assert step(scheduler) == {1: 44, 0: 4}  # only 4 of the 44 are shared


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


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
@pytest.mark.parametrize(("max_num_seqs", "num_blocks", "own"), [(2, 256, 10), (8, 60, 80)], ids=["slots", "blocks"])
def test_nobody_takes_the_place_of_who_waits(policy: str, max_num_seqs: int, num_blocks: int, own: int) -> None:
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, num_blocks=num_blocks, policy=policy)
    document = make_request("document", prompt(104, 0, 1), max_tokens=40, arrival_s=0.0, due_s=9.0)
    question = make_request("question", prompt(104, own, 2), max_tokens=1, arrival_s=1.0, due_s=1.0)
    unrelated = make_request("unrelated", prompt(0, 80, 3), max_tokens=40, arrival_s=2.0, due_s=500.0)
    scheduler.add(replace(document, priority=policy == "priority"))
    step(scheduler)
    scheduler.add(question)
    scheduler.add(replace(unrelated, priority=2 * (policy == "priority")))
    assert step(scheduler) == {0: 40}  # tokens are left for the unrelated one, but not what the question needs
    assert step(scheduler)[1] == min(own, WHOLE_STEP - 1)
    while "question" in scheduler:
        assert 2 not in step(scheduler)
    assert scheduler.stats(0.0).num_preemptions == 0
    run(scheduler)
    assert scheduler.stats(0.0).num_cached_tokens == 104


def test_nobody_takes_the_blocks_of_who_has_none_yet() -> None:
    scheduler = make_scheduler(num_blocks=64)
    for who in (1, 2):
        scheduler.add(make_request(f"turn{who}", prompt(0, 66, who), max_tokens=1, due_s=float(who)))
        step(scheduler)
    scheduler.add(make_request("large", prompt(0, 200, 3), max_tokens=1, due_s=0.5))
    scheduler.add(make_request("small", prompt(0, 10, 4), max_tokens=1, due_s=0.6))
    assert step(scheduler) == {1: 4}  # the large one lacks four blocks until this one ends


def test_what_is_kept_is_no_more_than_needed() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=9)
    scheduler.add(make_request("turn", prompt(72, 0, 1), max_tokens=1, due_s=9.0))  # 18 of 64 blocks
    step(scheduler)
    follow_up = [*prompt(72, 0, 1), *range(5000, 5060)]  # 15 more blocks, which all of them share
    for who in range(2, 8):
        scheduler.add(make_request(f"r{who}", [*follow_up, 9000 + who], max_tokens=1, due_s=5.0))
    scheduler.add(make_request("unrelated", prompt(0, 56, 8), max_tokens=1, due_s=500.0))  # 15 blocks with its answer
    assert step(scheduler) == {0: 8, 7: 56}
    assert run(scheduler) == 60 + 6


def test_many_who_wait_for_a_prompt_stop_nobody() -> None:
    num_followers, own = 300, 6
    scheduler = make_scheduler()
    scheduler.add(make_request("hot", prompt(200, own, 1), max_tokens=1, due_s=9.0))
    step(scheduler)
    for who in range(2, 2 + num_followers):
        scheduler.add(make_request(f"r{who}", prompt(200, own, who), max_tokens=1, due_s=5.0 + who))
    scheduler.add(make_request("before them", prompt(0, 50, 1000), max_tokens=1, due_s=1.0))
    scheduler.add(make_request("after them", prompt(0, 50, 1001), max_tokens=1, due_s=500.0))
    assert step(scheduler) == {1 + num_followers: 50, 0: 14}
    num_tokens, num_steps = 0, 0
    while scheduler.has_work:
        num_tokens, num_steps = num_tokens + sum(step(scheduler).values()), num_steps + 1
    assert num_tokens == 200 - 64 - 14 + own * (1 + num_followers) + 50
    assert num_steps <= 3 + num_followers // 8 + 2  # the prompt, then as many at a time as there are slots


def test_who_yields_keeps_no_slot_from_others() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request("document", prompt(400, 0, 1), max_tokens=1, due_s=9.0, yields=True))
    step(scheduler)
    scheduler.add(make_request("question", prompt(400, 9, 2), max_tokens=1, due_s=1.0, yields=True))
    scheduler.add(make_request("light", prompt(0, 10, 3), max_tokens=1, due_s=2.0))
    assert step(scheduler)[2] == 10


def test_each_is_looked_up_at_most_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=1024, max_num_seqs=12)
    for who in range(1, 6):
        heavy = make_request(f"heavy{who}", prompt(0, 400, who), max_tokens=1, due_s=100.0 - who, yields=True)
        scheduler.add(heavy)
        for _ in range(3):
            step(scheduler)
    scheduler.add(make_request("hot", prompt(400, 0, 9), max_tokens=1, due_s=50.0))
    step(scheduler)
    for who in range(10, 60):
        scheduler.add(make_request(f"r{who}", prompt(400, 8, who), max_tokens=1, due_s=1.0 + who / 60))
    looked_up: list[int] = []
    match = KVCacheManager.match

    def counted(kv: KVCacheManager, block_hashes: list[BlockHash], num_tokens: int) -> list[Cached]:
        looked_up.append(num_tokens)
        return match(kv, block_hashes, num_tokens)

    monkeypatch.setattr(KVCacheManager, "match", counted)
    assert scheduler.stats(0.0).num_running == 6
    for num_hot in (*5 * [WHOLE_STEP], 16):  # the last of these steps has room for more than the hot one
        looked_up.clear()
        assert step(scheduler)[5] == num_hot
        assert 1 <= len(looked_up) <= 12 - 6


def test_nobody_waits_for_copies_that_are_not_cached() -> None:
    scheduler = make_scheduler(num_blocks=400)
    scheduler.add(make_request("first", [*range(4), *range(900, 930)], max_tokens=1, due_s=1.0))
    slow = [*range(4), *range(2000, 2640)]
    scheduler.add(make_request("slow", slow, max_tokens=1, due_s=9.0))
    assert step(scheduler) == {0: 34, 1: 30}  # both compute the first block; only the first one's is cached
    step(scheduler)
    for who in (3, 4):  # one after the other they take all other blocks
        scheduler.add(make_request(f"large{who}", prompt(0, 780, who), max_tokens=1, due_s=2.0))
        while f"large{who}" in scheduler:
            step(scheduler)
    third = make_request("third", [*slow[:500], 7, 8, 9], max_tokens=1, due_s=3.0)
    cached = hash_blocks(slow, 4)
    assert cached[0] not in set(scheduler.kv.cached_hashes())
    assert cached[1] in set(scheduler.kv.cached_hashes())
    scheduler.add(third)
    assert step(scheduler) == {4: WHOLE_STEP}


def test_few_tokens_that_fit_into_the_step_are_not_waited_for() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("document", prompt(68, 400, 1), max_tokens=1, due_s=99.0))
    step(scheduler)
    scheduler.add(make_request("question", prompt(68, 3, 2), max_tokens=1, due_s=1.0))  # 4 of its last 7 are shared
    scheduler.add(make_request("unrelated", prompt(0, 50, 3), max_tokens=1, due_s=2.0))
    assert step(scheduler) == {1: 7, 2: 50, 0: 7}


def test_in_the_place_of_who_waits_the_other_gets_no_more_than_they_share() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("document", prompt(80, 50, 1), max_tokens=1, due_s=9.0))
    step(scheduler)
    scheduler.add(make_request("question", prompt(80, 10, 2), max_tokens=1, due_s=1.0))
    scheduler.add(make_request("unrelated", prompt(0, 30, 3), max_tokens=1, due_s=5.0))
    scheduler.add(make_request("late", prompt(0, 30, 4), max_tokens=1, due_s=50.0))
    assert step(scheduler) == {0: 16 + 18, 2: 30}  # 16 shared, and the 18 that the unrelated one leaves
    assert step(scheduler) == {1: 10, 0: 32, 3: 22}
    assert run(scheduler) == 8


def test_blocks_that_several_need_are_kept_once() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=64, block_size=4))
    line = WaitingLine((), (), kv)
    scheduler = make_scheduler()
    for who in range(3):  # 5 blocks given, 5 to share, 1 of its own, 1 begun
        scheduler.add(make_request(f"r{who}", [*range(40), *range(1000 * who, 1000 * who + 5)], max_tokens=1))
    for sequence in scheduler._waiting:
        line.keep(sequence, 5)
    assert (line.num_kept_slots, line.num_kept_blocks) == (3, 5 + 3 * 2)
