"""The scheduler against an oracle that knows neither blocks nor batches: whatever the pool, the tokens are the same."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_replica import step_plan
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.finish_rule import FinishRule
from shoal_replica.request import FinishReason
from shoal_replica.testing import (
    expected_beams,
    expected_prompt_logprobs,
    expected_tokens,
    make_request,
    make_scheduler,
)

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
MAX_SCORED = 7  # in a step: less than a prompt has
scores = st.none() | st.integers(0, 2)
apart = st.sampled_from([("", ""), ("", ""), ("a", ""), ("b", ""), ("", "salt")])  # adapter and salt: whose cache
events = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            prompts,
            apart,
            st.integers(1, 12),
            st.integers(1, 3),
            st.integers(0, 2),
            st.booleans(),
            scores,
        ),
        st.tuples(st.just("beams"), prompts, apart, st.integers(1, 12), st.integers(2, 4), st.booleans()),
        st.tuples(st.just("resume"), prompts, apart, st.integers(1, 11), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.none() | st.integers(0, 2), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=30,
)


@mock.patch.object(step_plan, "MAX_SCORED_TOKENS", MAX_SCORED)
@settings(max_examples=400)
@given(
    events=events,
    num_blocks=st.integers(11, 30),
    block_size=st.sampled_from([1, 4]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "deadline"]),
    looks_ahead=st.sampled_from(["no", "at once", "late"]),
    num_host_blocks=st.sampled_from([0, 2, 8, 100]),
    num_speculative_tokens=st.sampled_from([0, 1, 5]),
)
def test_tokens_do_not_depend_on_blocks_batches_or_preemption(
    events,
    num_blocks,
    block_size,
    max_num_seqs,
    max_num_batched_tokens,
    caching,
    policy,
    looks_ahead,
    num_host_blocks,
    num_speculative_tokens,
):
    scheduler, executor = make_scheduler(
        num_blocks=num_blocks * 4 // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=43,
        enable_prefix_caching=caching,
        policy=policy,
        num_host_blocks=num_host_blocks if caching else 0,
        num_speculative_tokens=num_speculative_tokens,
        adapters=("a", "b"),
    )
    requests = {}
    resumed: dict[str, list[int]] = {}  # tokens that another replica has already sampled
    streams: dict[tuple[str, int], list[int]] = defaultdict(list)
    reasons: dict[tuple[str, int], FinishReason] = {}
    told: dict[str, list[TokenLogprobs]] = {}
    mirror: set[bytes] = set()

    def take(deltas):
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in reasons, "nothing follows a finish reason"
            assert delta.position == len(resumed.get(delta.request_id, ())) + len(streams[key])
            streams[key].extend(delta.token_ids)
            if delta.prompt_logprobs:
                assert not told.get(delta.request_id), "they are told once"
                told[delta.request_id] = list(delta.prompt_logprobs)
                assert delta.num_cached_tokens == 0
            if delta.finish_reason is not None:
                reasons[key] = delta.finish_reason
        stored, removed = scheduler.take_block_events()
        assert mirror.isdisjoint(stored)
        assert mirror.issuperset(removed)
        mirror.difference_update(removed)
        mirror.update(stored)
        assert mirror == set(scheduler.kv.cached_hashes())
        scheduler.check_invariants()
        stats = scheduler.stats(0.0)
        assert stats.num_allocated_blocks + stats.num_free_blocks == stats.num_total_blocks
        assert stats.num_cached_blocks <= stats.num_free_blocks

    running = None  # a step planned ahead and executed but not processed: the plan, what was executed, the result

    def step(aborted: tuple[str, int | None] | None = None) -> bool:
        """One step as the engine runs it; with lookahead the next one is executed before this one is processed."""
        nonlocal running
        if running is None:
            planned = output = scheduler.schedule(0.0)
            scheduler.check_invariants()
            if output is None:
                assert not scheduler.has_work
                return False
            result = executor.execute(output)
        else:
            planned, output, result = running
            scheduler.lookahead.note_told(output)
        assert 0 < output.num_tokens <= max_num_batched_tokens
        assert len(output.scheduled) <= max_num_seqs
        assert sum(share.num_scored for share in output.scheduled) <= MAX_SCORED
        assert all(len(share.drafts) <= num_speculative_tokens for share in output.scheduled)
        following = scheduler.lookahead.plan(planned) if looks_ahead != "no" else None
        if aborted is not None and aborted[1] is None:
            take(scheduler.abort(*aborted))

        def go_on() -> None:
            nonlocal running
            confirmed = scheduler.lookahead.confirm(following, output, result) if following is not None else None
            running = (following, confirmed, executor.execute(confirmed)) if confirmed is not None else None

        if looks_ahead != "late":
            go_on()
        if aborted is not None:
            take(scheduler.abort(*aborted))
        take(scheduler.update(output, result))
        if looks_ahead == "late":
            go_on()
        return True

    for number, event in enumerate(events):
        if event[0] == "add":
            _, prompt, (adapter, salt), max_tokens, n, priority, yields, prompt_logprobs = event
            request = make_request(
                f"r{number}",
                prompt,
                max_tokens=max_tokens,
                n=n,
                priority=priority,
                arrival_s=float(number),
                due_s=float(number % 3),
                yields=yields,
                prompt_logprobs=prompt_logprobs,
                adapter=adapter,
                cache_salt=salt,
            )
            requests[request.request_id] = request
            scheduler.add(request)
        elif event[0] == "beams":
            _, prompt, (adapter, salt), max_tokens, width, all_of_them = event
            request = make_request(
                f"r{number}",
                prompt,
                max_tokens=max_tokens,
                n=width if all_of_them else 1,
                beam_width=width,
                arrival_s=float(number // 2),
                adapter=adapter,
                cache_salt=salt,
            )
            with suppress(InvalidArgument):  # its beams may not fit
                scheduler.add(request)
                requests[request.request_id] = request
        elif event[0] == "resume":
            _, prompt, (adapter, salt), num_drawn, index = event
            drawn = expected_tokens(prompt, num_drawn, index, adapter)
            request = make_request(
                f"r{number}",
                prompt,
                max_tokens=12,
                output_token_ids=drawn,
                arrival_s=float(number),
                adapter=adapter,
                cache_salt=salt,
            )
            request = replace(request, index=index)
            requests[request.request_id] = request
            resumed[request.request_id] = drawn
            scheduler.add(request)
        elif event[0] == "abort":
            _, victim, index, mid_step = event
            if mid_step:
                step((f"r{victim}", index))
            else:
                take(scheduler.abort(f"r{victim}", index))
        else:
            for _ in range(event[1]):
                step()
    for _ in range(3000):
        if not step():
            break
    assert not scheduler.has_work
    assert scheduler.stats(0.0).num_allocated_blocks == 0

    for request_id, request in requests.items():
        params = request.sampling_params
        wanted_len = min(params.max_tokens, 43 - request.num_prompt_tokens)
        for (other_id, index), tokens in streams.items():
            if other_id != request_id or params.is_beam_search:
                continue
            wanted = expected_tokens(request.prompt_token_ids, wanted_len, index, request.adapter)
            wanted = wanted[len(request.output_token_ids) :]
            assert tokens == wanted[: len(tokens)]
            if reasons[other_id, index] is FinishReason.LENGTH:
                assert tokens == wanted
        is_scored = params.prompt_logprobs is not None and bool(streams[request_id, 0])
        assert told.get(request_id, []) == (
            expected_prompt_logprobs(request.prompt_token_ids, params.prompt_logprobs, request.adapter)
            if is_scored
            else []
        )
        if params.is_beam_search:
            beams = expected_beams(request, FinishRule(frozenset(), 43))
            for index in range(params.n):
                is_aborted = reasons[request_id, index] is FinishReason.ABORT
                assert streams[request_id, index] == ([] if is_aborted else beams[index])
        ended = {index for other_id, index in reasons if other_id == request_id}
        assert ended == set(range(request.index, request.index + params.n))
