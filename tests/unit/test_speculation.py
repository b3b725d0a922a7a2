"""Which drafts are computed: those that should make a step's tokens cheaper, by what was measured."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from fixtures.engines import finished, running_engine

from shoal_replica.draft_odds import DraftOdds
from shoal_replica.executor import Draft, SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.request import FinishReason
from shoal_replica.scheduler import Scheduler
from shoal_replica.step_costs import MAX_AGE, MOST_TOKENS, StepCosts
from shoal_replica.testing import expected_tokens, make_request, make_scheduler

PROMPT_S, DECODE_S = 0.8, 0.1  # of a prompt of eight tokens, and of a decode


def step(*num_tokens: int, drafts: int = 0) -> SchedulerOutput:
    """A step with so many tokens of each sequence, the last ones of each drafts."""
    return SchedulerOutput(
        1, tuple(ScheduledSequence(i, 9, count, True, 0, (7,) * drafts) for i, count in enumerate(num_tokens))
    )


def decoding(num_sequences: int = 1, *, token_s: float = 0.01, max_tokens: int = 30, **settings: int) -> Scheduler:
    """A scheduler whose sequences have their first token, after steps that tell what a prompt's token and a decode
    cost.
    """
    scheduler, _ = make_scheduler(**{"num_speculative_tokens": 6, "max_num_batched_tokens": 64} | settings)
    scheduler._speculation._costs.take(step(100), 100 * token_s)
    scheduler._speculation._costs.take(step(*[1] * num_sequences), DECODE_S)
    for i in range(num_sequences):
        scheduler.add(make_request(str(i), range(10 * i, 10 * i + 3), max_tokens=max_tokens))
    offer(scheduler)
    return scheduler


def offer(scheduler: Scheduler, *drafts: Draft) -> None:
    """Run a step, after which these drafts are offered."""
    output = scheduler.schedule(0.0)
    assert output is not None
    sampled = tuple(SampledToken(s.seq_id, 5) for s in output.scheduled)
    scheduler.update(output, StepResult(sampled, drafts=drafts, step_s=DECODE_S))


def tried(scheduler: Scheduler) -> dict[int, tuple[int, ...]]:
    output = scheduler.schedule(0.0)
    assert output is not None
    scheduler.check_invariants()
    assert output.num_tokens == len(output.scheduled) + sum(len(s.drafts) for s in output.scheduled)
    return {share.seq_id: share.drafts for share in output.scheduled}


def test_costs_are_those_measured_and_else_a_prompts() -> None:
    costs = StepCosts()
    assert costs.of_decodes(1, 3) == []
    costs.take(step(1), 1.0)
    assert costs.of_decodes(1, 3) == []  # what a token more costs is not known
    costs.take(step(10), 2.0)
    assert costs.of_decodes(1, 3) == pytest.approx([1.0, 1.2, 1.4])
    assert costs.of_decodes(2, 3) == pytest.approx([1.2, 1.4])
    costs.take(step(3, drafts=2), 1.2)
    assert costs.of_decodes(1, 5) == pytest.approx([1.0, 1.2, 1.3, 1.5, 1.7])
    costs.take(step(1), 50.0)  # one that has lost its core
    assert costs.of_decodes(1, 1) == pytest.approx([1.1])
    for _ in range(50):
        costs.take(step(3, drafts=2), 3.0)
        costs.take(step(1, 1), 0.7)
    assert costs.of_decodes(1, 4) == pytest.approx([1.1, 1.1, 3.0, 3.2], abs=0.02)  # no less than with fewer tokens
    costs.take(step(1, 7), 0.8)
    assert costs.of_decodes(3, 4) == pytest.approx([3.0, 3.1], abs=0.02)
    assert len(costs.of_decodes(1, 10**6)) == MOST_TOKENS


def test_old_costs_are_measured_again() -> None:
    costs = StepCosts()
    costs.take(step(10), 2.0)
    costs.take(step(1), 1.0)
    costs.take(step(3, drafts=2), 9.0)
    for _ in range(MAX_AGE):
        assert costs.of_decodes(1, 3) == pytest.approx([1.0, 1.2, 1.54])
        costs.take(step(1), 1.0)
    assert costs.of_decodes(1, 3) == pytest.approx([1.0, 1.2, 1.4])


def test_odds_are_learnt_by_the_length_of_the_match() -> None:
    odds, before = DraftOdds(), DraftOdds()
    for _ in range(100):
        odds.take(2, 4, 1)  # the first is right, the second wrong, the others say nothing
    assert odds[2] > 0.95
    assert odds[3] < 0.1
    assert [odds[length] for length in (1, 4, 5, 9)] == [before[length] for length in (1, 4, 5, 9)]
    for _ in range(1000):
        odds.take(2, 1, 0)
    assert odds[2] < 0.05  # what was once so is forgotten


def test_the_likeliest_are_computed_while_they_pay() -> None:
    """Two sequences: 20 tokens a second. A token takes a tenth of a step, so a draft pays if it is more often right
    than a fifth of the time, and those that are right pay for others.
    """
    scheduler = decoding(2)
    offer(scheduler, Draft(0, 5, 8, (1, 2, 3, 4, 5, 6)), Draft(1, 5, 1, (7, 8)))
    assert tried(scheduler) == {0: (1, 2, 3, 4, 5, 6), 1: ()}


@pytest.mark.parametrize(("token_s", "expected"), [(0.001, 6), (0.02, 3), (0.06, 1), (0.095, 0)])
def test_the_dearer_a_token_the_fewer(token_s: float, expected: int) -> None:
    scheduler = decoding(token_s=token_s)
    scheduler._speculation._odds[True]._right = [0.0, 0.8, 0.8, 0.8, *[0.5] * 5]
    scheduler._speculation._odds[True]._tried = [1.0] * 9
    offer(scheduler, Draft(0, 5, 1, (1, 2, 3, 4, 5, 6)))
    assert len(tried(scheduler)[0]) == expected


def test_none_beyond_the_answer_or_the_model() -> None:
    scheduler = decoding(max_tokens=5)
    offer(scheduler, Draft(0, 5, 8, (1, 2, 3, 4)))  # two of five are there, and one is sampled anyway
    assert tried(scheduler) == {0: (1, 2)}
    scheduler = decoding(max_model_len=7)
    offer(scheduler, Draft(0, 5, 8, (1, 2, 3, 4)))
    assert tried(scheduler) == {0: (1,)}


def test_none_for_other_tokens_than_those_that_were_there() -> None:
    scheduler = decoding()
    offer(scheduler, Draft(0, 4, 8, (1, 2)))
    assert tried(scheduler) == {0: ()}


def test_none_beside_prompts_or_while_little_is_known() -> None:
    scheduler = decoding()
    offer(scheduler, Draft(0, 5, 8, (1, 2)))
    scheduler.add(make_request("late", range(20, 30)))
    output = scheduler.schedule(0.0)
    assert output is not None
    assert [(s.num_new_tokens, s.drafts) for s in output.scheduled] == [(1, ()), (10, ())]
    scheduler, _ = make_scheduler(num_speculative_tokens=6)
    scheduler.add(make_request())
    output = scheduler.schedule(0.0)
    assert output is not None
    assert output.num_drafts_wanted == 0


def test_drafts_take_no_block_that_others_may_need() -> None:
    """The sequence has used its two blocks of four tokens when 8 are computed."""
    for num_blocks, expected in ((3, ()), (4, (1, 2))):
        scheduler = decoding(num_blocks=num_blocks, max_model_len=12)
        for _ in range(3):
            offer(scheduler)
        offer(scheduler, Draft(0, 8, 8, (1, 2)))
        assert tried(scheduler) == {0: expected}


def test_offers_that_were_not_computed_teach_as_well() -> None:
    """So what has not paid for a while is found out when it would."""
    scheduler = decoding(token_s=0.09, max_tokens=500, max_model_len=600, num_blocks=200)
    sequence, odds = scheduler._live.by_id[0], scheduler._speculation._odds[True]
    for _ in range(60):
        offer(scheduler, Draft(0, sequence.num_tokens + 1, 3, (7,)))
    assert odds[3] < 0.1
    for _ in range(200):
        offer(scheduler, Draft(0, sequence.num_tokens + 1, 3, (5,)))  # which is how the sequence goes on
    assert odds[3] > 0.7
    assert scheduler.stats(0.0).num_draft_tokens == 0


def test_no_draft_where_the_pool_is_full() -> None:
    """Beyond those for which the last block has room: it has 4 tokens, and there are 7."""
    scheduler = decoding(num_blocks=3, max_model_len=12)
    for _ in range(2):
        offer(scheduler)
    scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
    output = scheduler.schedule(0.0)
    assert output is not None
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    assert ahead.block_updates == ()
    for num_drafts in (1, 4):
        drafts = (Draft(0, 7, 8, (1, 2, 3, 4)[:num_drafts]),)
        confirmed = scheduler.lookahead.confirm(ahead, output, StepResult((SampledToken(0, 5),), drafts=drafts))
        assert confirmed is not None
        assert confirmed.scheduled == (ScheduledSequence(0, 6, 2, True, drafts=(1,)),)


def test_another_thread_may_ask_while_steps_end() -> None:
    """With the interpreter changing threads as often as it can."""
    scheduler = decoding(2, max_tokens=10**6, max_model_len=128)
    speculation, before, failures = scheduler._speculation, sys.getswitchinterval(), list[BaseException]()
    live = dict(scheduler._live.by_id)
    speculation._by_id = live
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                speculation.choose([Draft(i, 5, 8, (1, 2, 3)) for i in (0, 1)], 2, 64)
        except BaseException as error:
            failures.append(error)

    asker = threading.Thread(target=ask)
    sys.setswitchinterval(1e-6)
    try:
        asker.start()
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not failures:
            for count in range(1, 60):
                sequence = live.pop(1)
                speculation._costs.take(step(1, drafts=0) if count == 1 else step(count, drafts=count - 1), DECODE_S)
                live[1] = sequence
    finally:
        is_over.set()
        asker.join()
        sys.setswitchinterval(before)
    assert not failures


def test_an_end_within_drafts_ends_the_sequence() -> None:
    scheduler = decoding(max_tokens=10)
    offer(scheduler, Draft(0, 5, 8, (1, 2, 3)))
    output = scheduler.schedule(0.0)
    assert output is not None
    right = tuple(SampledToken(0, token_id) for token_id in (1, 2, 3, 4))
    (delta,) = scheduler.update(output, StepResult(right, step_s=DECODE_S))
    assert (delta.position, delta.token_ids, delta.finish_reason) == (2, (1, 2, 3, 4), None)
    stats = scheduler.stats(0.0)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_generated_tokens) == (3, 3, 6)
    offer(scheduler, Draft(0, 10, 8, (1, 2, 3)))
    output = scheduler.schedule(0.0)
    assert output is not None
    cut = (SampledToken(0, 1), SampledToken(0, 2, is_cut=True), SampledToken(0, 3))
    (delta,) = scheduler.update(output, StepResult(cut, step_s=DECODE_S))
    assert (delta.token_ids, delta.finish_reason) == ((1, 2), FinishReason.LENGTH)
    assert scheduler.stats(0.0).num_allocated_blocks == 0


def test_a_planned_step_takes_the_drafts_that_are_worth_it() -> None:
    scheduler = decoding()
    output = scheduler.schedule(0.0)
    assert output is not None
    assert output.num_drafts_wanted == 6
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    assert ahead.num_drafts_wanted == 6
    assert ahead.room == {0: 12}  # five tokens and six drafts
    sampled = (SampledToken(0, 5),)
    unlikely, likely = (Draft(0, 5, 0, (1,)),), (Draft(0, 5, 8, (1, 2)),)
    plain = scheduler.lookahead.confirm(ahead, output, StepResult(sampled, drafts=unlikely))
    assert plain is not None
    assert plain.scheduled == (ScheduledSequence(0, 4, 1, True),)
    result = StepResult(sampled, drafts=likely, step_s=DECODE_S)
    confirmed = scheduler.lookahead.confirm(ahead, output, result)
    assert confirmed is not None
    assert confirmed.scheduled == (ScheduledSequence(0, 4, 3, True, drafts=(1, 2)),)
    assert confirmed.block_updates == ahead.block_updates
    scheduler.update(output, result)
    assert scheduler.lookahead.confirm(ahead, output, result) == confirmed


@pytest.mark.parametrize(("tokens", "num_computed"), [((1, 2, 3), 7), ((1, 4), 6), ((9,), 5)])
def test_a_planned_step_goes_on_after_the_drafts_that_were_right(tokens: tuple[int, ...], num_computed: int) -> None:
    scheduler = decoding()
    offer(scheduler, Draft(0, 5, 8, (1, 2)))
    output = scheduler.schedule(0.0)
    assert output is not None
    assert output.scheduled == (ScheduledSequence(0, 4, 3, True, drafts=(1, 2)),)
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    assert ahead.room == {0: 16}  # eight tokens and six drafts
    drafts = (Draft(0, num_computed + 1, 8, (6, 7)),)
    result = StepResult(tuple(SampledToken(0, token) for token in tokens), drafts=drafts, step_s=DECODE_S)
    confirmed = scheduler.lookahead.confirm(ahead, output, result)
    assert confirmed is not None
    assert confirmed.scheduled == (ScheduledSequence(0, num_computed, 3, True, drafts=(6, 7)),)
    scheduler.update(output, result)
    following = scheduler.lookahead.plan(ahead)
    assert following is not None
    assert following.room == {0: 4 * -(-(num_computed + 1 + 6 + 1 + 6) // 4)}


def test_a_planned_step_is_without_a_sequence_that_ends_within_its_drafts() -> None:
    scheduler = decoding(2, max_tokens=4)
    offer(scheduler, Draft(0, 5, 8, (1, 2)))  # two of four are there
    output = scheduler.schedule(0.0)
    assert output is not None
    assert [len(share.drafts) for share in output.scheduled] == [1, 0]
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    right = StepResult((SampledToken(0, 1), SampledToken(0, 2), SampledToken(1, 5)))
    confirmed = scheduler.lookahead.confirm(ahead, output, right)
    assert confirmed is not None
    assert confirmed.scheduled == (ScheduledSequence(1, 5, 1, True),)
    cut = StepResult((SampledToken(0, 1, is_cut=True), SampledToken(1, 5)))
    confirmed = scheduler.lookahead.confirm(ahead, output, cut)
    assert confirmed is not None
    assert confirmed.scheduled == (ScheduledSequence(1, 5, 1, True),)


async def test_an_engine_streams_what_was_right_in_fewer_steps() -> None:
    async with running_engine(num_speculative_tokens=6) as (engine, _, recorder):
        await finished(engine.add(make_request("a", range(12), max_tokens=100)))
        assert recorder.tokens["a", 0] == expected_tokens(range(12), 100)
        stats = engine.stats()
        assert stats.num_accepted_tokens > 10
        assert stats.num_steps == 100 - stats.num_accepted_tokens
