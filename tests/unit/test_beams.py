"""Beam searches under the scheduler: what it tells of them, what it refuses, and the blocks that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.engines import running_engine
from fixtures.waiting import until

from shoal_replica.config import CacheConfig
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import SampledToken, StepResult
from shoal_replica.finish_rule import FinishRule
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.request import FinishReason, StartTimes
from shoal_replica.request_checks import MAX_LOGPROBS_TOLD
from shoal_replica.testing import expected_beams, make_request, make_scheduler


def test_the_start_is_told_once_its_prompt_is_computed_and_the_answer_at_the_end() -> None:
    scheduler, executor = make_scheduler()
    asked = make_request("r", range(6), max_tokens=3, beam_width=2, n=2, arrival_s=1.0)
    scheduler.add(asked)
    output = scheduler.schedule(3.0)
    assert output is not None
    (start,) = scheduler.update(output, executor.execute(output), 7.0)
    assert (start.index, start.token_ids, start.finish_reason) == (0, (), None)
    assert start.start == StartTimes(queue_s=2.0, prefill_s=4.0)
    deltas = []
    while (output := scheduler.schedule(8.0)) is not None:
        deltas += scheduler.update(output, executor.execute(output), 9.0)
    assert [delta.index for delta in deltas] == [0, 1]
    assert [list(delta.token_ids) for delta in deltas] == expected_beams(asked, FinishRule(frozenset(), 128))
    assert {(delta.position, delta.start, delta.finish_reason) for delta in deltas} == {(0, None, FinishReason.LENGTH)}


def test_what_it_found_cached_is_told_also_if_it_is_aborted() -> None:
    scheduler, executor = make_scheduler()
    for name in ("before", "aborted"):
        scheduler.add(make_request(name, range(9), max_tokens=4, beam_width=2, n=2))
        output = scheduler.schedule(0.0)
        assert output is not None
        (start,) = scheduler.update(output, executor.execute(output))
        ends = scheduler.abort(name, 1)  # one of them is all of them
        assert [end.index for end in ends] == [0, 1]
        num_cached = 8 if name == "aborted" else 0
        assert {delta.num_cached_tokens for delta in (start, *ends)} == {num_cached}
    assert not scheduler.has_work


def test_a_start_is_told_once_also_of_a_search_that_begins_again() -> None:
    scheduler, executor = make_scheduler(num_blocks=12, block_size=2, max_model_len=16)
    for name, prompt, max_tokens in (("first", range(4), 5), ("second", range(10, 14), 4)):
        scheduler.add(make_request(name, prompt, max_tokens=max_tokens, beam_width=3))
    deltas = []
    while (output := scheduler.schedule(0.0)) is not None:
        deltas += scheduler.update(output, executor.execute(output))
        scheduler.check_invariants()
    assert scheduler.stats(0.0).num_preemptions == 1
    assert [delta.request_id for delta in deltas if delta.start] == ["first", "second"]


async def test_a_search_that_runs_is_not_handed_back() -> None:
    async with running_engine() as (engine, executor, recorder):
        engine.add(make_request("r", range(6), max_tokens=30, beam_width=3))
        await until(lambda: engine.stats().num_generated_tokens > 3)
        executor.gate.clear()
        assert not engine.hand_back("r")
        executor.gate.set()
        await until(lambda: bool(recorder.reasons))
        assert recorder.reasons == {("r", 0): FinishReason.LENGTH}


def test_beams_that_could_not_finish_alone_are_refused() -> None:
    scheduler, _ = make_scheduler(num_blocks=20, block_size=4, max_num_seqs=4, max_model_len=40)
    for width, max_tokens, field in ((5, 1, "beam_width"), (4, 24, "max_tokens")):
        with pytest.raises(InvalidArgument) as caught:
            scheduler.add(make_request("r", range(8), max_tokens=max_tokens, beam_width=width))
        assert caught.value.field == field
    scheduler.add(make_request("most", range(8), max_tokens=17, beam_width=4))  # 2 blocks, and 4 for each of 4 beams
    scheduler.add(make_request("long", range(30), max_tokens=10**9, beam_width=4))  # as many as the model has room for


def test_an_answer_too_large_for_a_message_is_refused() -> None:
    scheduler, _ = make_scheduler(num_blocks=4096, max_model_len=8192)
    asked = make_request("r", range(8), max_tokens=1200, beam_width=4, n=4)
    for logprobs, is_refused in ((None, False), (19, False), (20, True)):
        params = replace(asked.sampling_params, logprobs=logprobs)
        request = replace(asked, request_id=str(logprobs), sampling_params=params)
        if is_refused:
            with pytest.raises(InvalidArgument, match=f"logprobs: got 20; .* 100800 .* {MAX_LOGPROBS_TOLD}"):
                scheduler.add(request)
        else:
            scheduler.add(request)


def test_a_model_of_few_tokens_ends_the_beams_that_it_does_not_have() -> None:
    scheduler, executor = make_scheduler()
    scheduler.add(make_request("r", range(4), max_tokens=1, beam_width=6, n=6))
    output = scheduler.schedule(0.0)
    assert output is not None
    (token,) = executor.execute(output).sampled
    assert token.logprobs is not None
    few = SampledToken(token.seq_id, token.token_id, replace(token.logprobs, top=token.logprobs.top[:2]))
    _, *ends = scheduler.update(output, StepResult((few,)))
    assert [(end.index, len(end.token_ids)) for end in ends] == [(0, 1), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert {end.finish_reason for end in ends} == {FinishReason.LENGTH}


@pytest.mark.parametrize("num_tokens", [8, 9, 10, 11, 12])
def test_the_blocks_that_beams_take_together(num_tokens: int) -> None:
    """One of each set of beams that share a block with nobody else writes in place; all copy what others read."""
    for num_others in (0, 1):
        kv = KVCacheManager(CacheConfig(num_blocks=40, block_size=4))
        kv.allocate(0, [], num_tokens)
        for child in range(1, 4 + num_others):
            kv.fork(0, child)
        beams = range(4)
        needed = kv.num_blocks_to_append_to_all(beams, num_tokens, num_tokens + 1)
        before = kv.pool.num_free
        for seq_id in beams:
            kv.append(seq_id, num_tokens, num_tokens + 1)
        assert needed == before - kv.pool.num_free == (4 if num_tokens % 4 == 0 else 3 + num_others)
