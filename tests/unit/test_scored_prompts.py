"""Prompts whose log-probabilities are asked for, in the scheduler: what a step scores, and for whom."""

from __future__ import annotations

import pytest

from shoal_replica import step_plan
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import MAX_SCORED_TOKENS, SchedulerOutput, TokenLogprobs
from shoal_replica.request import Request
from shoal_replica.request_checks import MAX_LOGPROBS_TOLD
from shoal_replica.scheduler import Scheduler
from shoal_replica.testing import FakeExecutor, expected_prompt_logprobs, make_request, make_scheduler


def run(scheduler: Scheduler, executor: FakeExecutor) -> tuple[list[SchedulerOutput], dict[str, list[TokenLogprobs]]]:
    """All steps, and what was told of each prompt."""
    steps, told = list[SchedulerOutput](), dict[str, list[TokenLogprobs]]()
    while (output := scheduler.schedule(float(len(steps)))) is not None:
        steps.append(output)
        for delta in scheduler.update(output, executor.execute(output), float(len(steps))):
            told.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
        scheduler.check_invariants()
    return steps, told


def scored_first(steps: list[SchedulerOutput], seq_id: int) -> int:
    """The step in which a sequence's prompt is done."""
    return next(i for i, step in enumerate(steps) if any(s.seq_id == seq_id and s.samples for s in step.scheduled))


def test_a_prompt_that_is_preempted_while_it_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "MAX_SCORED_TOKENS", 3)
    scheduler, executor = make_scheduler(num_blocks=12, block_size=4, max_num_seqs=4)
    scheduler.add(make_request("first", range(10), max_tokens=20))
    scored = make_request("scored", range(100, 130), max_tokens=2, arrival_s=1.0, prompt_logprobs=1)
    scheduler.add(scored)
    steps, told = run(scheduler, executor)
    restarts = [s.num_computed_tokens for step in steps for s in step.scheduled if s.seq_id == 1 and s.num_scored]
    assert restarts.count(0) == 2
    assert restarts.index(0, 1) > 1, "it had been scored in part"
    assert told["scored"] == expected_prompt_logprobs(scored.prompt_token_ids, 1)


def test_a_prompt_that_is_preempted_later_is_not_scored_again() -> None:
    scheduler, executor = make_scheduler(num_blocks=14, block_size=4, max_num_seqs=4, max_model_len=56)
    scheduler.add(make_request("first", range(10), max_tokens=40))
    scheduler.add(make_request("scored", range(100, 120), max_tokens=20, arrival_s=1.0, prompt_logprobs=0))
    steps, told = run(scheduler, executor)
    assert scheduler.stats(0.0).num_preemptions > 0
    assert sum(s.num_scored for step in steps for s in step.scheduled) == 19
    assert told["scored"] == expected_prompt_logprobs(range(100, 120), 0)


@pytest.mark.parametrize("scores", [None, 0])
def test_one_that_yields_leaves_room_to_score(scores: int | None) -> None:
    """It would otherwise score as much as a step may, before a request that it yields to."""
    scheduler, executor = make_scheduler(
        num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4000
    )
    scheduler.add(make_request("yielding", [1] * 2000, yields=True, prompt_logprobs=scores))
    scheduler.add(make_request("other", [2] * 100, arrival_s=1.0, prompt_logprobs=scores))
    steps, _ = run(scheduler, executor)
    assert scored_first(steps, 1) <= (0 if scores is None else 4)
    assert scored_first(steps, 0) > 10


def test_together_they_score_as_much_as_a_step_may() -> None:
    scheduler, executor = make_scheduler(num_blocks=200, max_num_batched_tokens=512, max_model_len=400)
    for number in range(4):
        scheduler.add(make_request(str(number), [number] * 50, max_tokens=1, prompt_logprobs=0))
    steps, told = run(scheduler, executor)
    assert [sum(s.num_scored for s in step.scheduled) for step in steps] == [MAX_SCORED_TOKENS] * 3 + [4]
    assert [len(each) for each in told.values()] == [49] * 4


@pytest.mark.parametrize(("num_tokens", "num_top", "is_refused"), [(4762, 20, True), (4761, 20, False)])
def test_what_is_too_much_for_a_message(num_tokens: int, num_top: int, is_refused: bool) -> None:
    scheduler, _ = make_scheduler(num_blocks=2000, max_model_len=8000)
    request: Request = make_request("r", [1] * num_tokens, prompt_logprobs=num_top)
    if not is_refused:
        scheduler.add(request)
        return
    limit = f"prompt_logprobs: got 20; 4762 tokens would have 100002 of them, and at most {MAX_LOGPROBS_TOLD} are sent"
    with pytest.raises(InvalidArgument, match=limit):
        scheduler.add(request)
