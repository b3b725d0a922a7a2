"""Steps planned while another runs: what continues by itself, and what is left to the scheduler."""

from __future__ import annotations

import time

import pytest
from fixtures.engines import finished, running_engine
from fixtures.waiting import DEADLINE_S

from shoal_replica.executor import SampledToken, ScheduledSequence, SchedulerOutput, StepResult
from shoal_replica.reports import StepReport
from shoal_replica.request import Request
from shoal_replica.scheduler import Scheduler
from shoal_replica.testing import FakeExecutor, make_request, make_scheduler


def started(*requests: Request, **settings: int) -> tuple[Scheduler, FakeExecutor, SchedulerOutput]:
    """A scheduler that has handed out the first step of its requests, a whole prompt each."""
    scheduler, executor = make_scheduler(**settings)  # type: ignore[arg-type]
    for request in requests:
        scheduler.add(request)
    output = scheduler.schedule(0.0)
    assert output is not None
    return scheduler, executor, output


def test_every_sequence_goes_on_by_a_token() -> None:
    scheduler, executor, output = started(make_request("a", range(4)), make_request("b", range(10, 16)))
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    assert ahead.room == {0: 8, 1: 8}
    assert [seq_id for seq_id, _, _ in ahead.block_updates] == [0]  # the other's last block has room
    result = executor.execute(output)
    confirmed = scheduler.lookahead.confirm(ahead, output, result)
    assert confirmed is not None
    assert confirmed.scheduled == (ScheduledSequence(0, 4, 1, True), ScheduledSequence(1, 6, 1, True))
    assert (confirmed.step, confirmed.block_updates) == (output.step + 1, ahead.block_updates)
    scheduler.update(output, result)
    assert scheduler.lookahead.confirm(ahead, output, result) == confirmed  # and afterwards as well
    assert scheduler.lookahead.plan(ahead) is not None


@pytest.mark.parametrize("max_model_len", range(40, 45))
@pytest.mark.parametrize("max_tokens", [20, 100])
def test_no_block_beyond_what_a_sequence_may_compute(max_model_len: int, max_tokens: int) -> None:
    request = make_request(max_tokens=max_tokens)
    scheduler, executor = make_scheduler(max_model_len=max_model_len, num_speculative_tokens=6)
    scheduler.add(request)
    end = min(max_model_len, request.num_prompt_tokens + max_tokens)
    output, ahead = scheduler.schedule(0.0), None
    while output is not None:
        ahead = scheduler.lookahead.plan(output if ahead is None else ahead)
        assert scheduler.stats(0.0).num_allocated_blocks <= -(-end // 4)
        result = executor.execute(output)
        confirmed = scheduler.lookahead.confirm(ahead, output, result) if ahead is not None else None
        scheduler.update(output, result)
        if confirmed is None:
            ahead, confirmed = None, scheduler.schedule(0.0)
        else:
            scheduler.lookahead.note_told(confirmed)
        output = confirmed
    assert not scheduler.has_work


def test_a_sequence_that_ends_is_left_out() -> None:
    last = make_request("last", range(3), max_tokens=1)
    scheduler, executor, output = started(last, make_request("b", range(10, 16)))
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    confirmed = scheduler.lookahead.confirm(ahead, output, executor.execute(output))
    assert confirmed is not None
    assert [share.seq_id for share in confirmed.scheduled] == [1]


def test_who_was_left_out_of_a_step_is_left_out_of_the_next() -> None:
    """The abort comes after the step after next has been planned and before the next one starts."""
    scheduler, executor, output = started(make_request("a", range(4)), make_request("b", range(10, 16)))
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    result = executor.execute(output)
    scheduler.update(output, result)
    following = scheduler.lookahead.plan(ahead)
    assert following is not None
    scheduler.abort("a")
    confirmed = scheduler.lookahead.confirm(ahead, output, result)
    assert confirmed is not None
    after = scheduler.lookahead.confirm(following, confirmed, executor.execute(confirmed))
    assert after is not None
    assert [share.seq_id for share in after.scheduled] == [1]
    executor.execute(after)


def test_nothing_is_left_to_go_on() -> None:
    scheduler, executor, output = started(make_request(max_tokens=1))
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    assert scheduler.lookahead.confirm(ahead, output, executor.execute(output)) is None


def test_an_arrival_is_not_kept_waiting_for_a_planned_step() -> None:
    """The planned step is dropped; the step that starts the new request reports the blocks that it had allocated."""
    scheduler, executor, output = started(make_request("a", range(4)))
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    scheduler.add(make_request("late", range(5)))
    result = executor.execute(output)
    assert scheduler.lookahead.confirm(ahead, output, result) is None
    scheduler.update(output, result)
    following = scheduler.schedule(0.0)
    assert following is not None
    assert [new.token_ids for new in following.new_sequences] == [tuple(range(5))]
    assert following.block_updates == ahead.block_updates
    executor.execute(following)


def test_a_full_house_goes_on_until_somebody_leaves() -> None:
    scheduler, _, output = started(*(make_request(str(i), range(3)) for i in range(3)), max_num_seqs=2)
    ahead = scheduler.lookahead.plan(output)
    assert ahead is not None
    going_on = StepResult((SampledToken(0, 7), SampledToken(1, 7)))
    assert scheduler.lookahead.confirm(ahead, output, going_on) is not None
    scheduler.abort("0")
    assert scheduler.lookahead.confirm(ahead, output, going_on) is None


def test_when_blocks_run_out_the_scheduler_decides() -> None:
    scheduler, _, output = started(make_request("a", range(4)), make_request("b", range(10, 18)), num_blocks=4)
    assert scheduler.lookahead.plan(output) is None
    assert scheduler.stats(0.0).num_free_blocks == 1  # none was taken


def test_prompts_in_chunks_and_siblings_are_the_schedulers() -> None:
    for request in (make_request(prompt_token_ids=range(40)), make_request(n=2)):
        scheduler, _, output = started(request)
        assert scheduler.lookahead.plan(output) is None


@pytest.mark.parametrize("num_tokens", [3, 100])
async def test_the_next_step_starts_before_the_last_one_is_told(num_tokens: int) -> None:
    """Whether it was planned ahead or, after a piece of a prompt, scheduled."""
    async with running_engine(max_num_batched_tokens=32) as (engine, executor, _):
        num_started: list[int] = []
        num_steps = -(-num_tokens // 32) + 5

        def slow_reader(report: StepReport) -> None:
            """Block the event loop until the next step has started without it."""
            if report.step_s is None:
                return
            deadline = time.monotonic() + DEADLINE_S
            wanted = min(len(num_started) + 2, num_steps)
            while executor.num_started < wanted:
                assert time.monotonic() < deadline
            num_started.append(executor.num_started)

        engine.subscribe(slow_reader)
        await finished(engine.add(make_request("r", range(num_tokens), max_tokens=6)))
        assert num_started == [*range(2, num_steps + 1), num_steps]
        assert engine.stats().num_steps == num_steps
