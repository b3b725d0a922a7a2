"""The scheduler against an oracle that knows neither blocks nor batches: whatever the pool, the tokens are the same."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_replica.request import FinishReason
from shoal_replica.testing import expected_tokens, make_request, make_scheduler

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 12), st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    events=events,
    num_blocks=st.integers(11, 30),
    block_size=st.sampled_from([1, 4]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_tokens_do_not_depend_on_blocks_batches_or_preemption(
    events, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, caching, policy
):
    scheduler, executor = make_scheduler(
        num_blocks=num_blocks * 4 // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=43,
        enable_prefix_caching=caching,
        policy=policy,
    )
    requests = {}
    streams: dict[tuple[str, int], list[int]] = defaultdict(list)
    reasons: dict[tuple[str, int], FinishReason] = {}
    mirror: set[bytes] = set()

    def take(deltas):
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in reasons, "nothing follows a finish reason"
            assert delta.position == len(streams[key])
            streams[key].extend(delta.token_ids)
            if delta.finish_reason is not None:
                reasons[key] = delta.finish_reason
        stored, removed = scheduler.take_block_events()
        assert mirror.isdisjoint(stored)
        assert mirror.issuperset(removed)
        mirror.difference_update(removed)
        mirror.update(stored)
        assert mirror == set(scheduler.cache_hashes())
        scheduler.check_invariants()
        stats = scheduler.stats(0.0)
        assert stats.num_allocated_blocks + stats.num_free_blocks == stats.num_total_blocks
        assert stats.num_cached_blocks <= stats.num_free_blocks

    def step() -> bool:
        output = scheduler.schedule(0.0)
        scheduler.check_invariants()
        if output is None:
            return False
        assert 0 < output.num_tokens <= max_num_batched_tokens
        assert len(output.scheduled) <= max_num_seqs
        take(scheduler.update(output, executor.execute(output)))
        return True

    for number, event in enumerate(events):
        if event[0] == "add":
            _, prompt, max_tokens, n, priority = event
            request = make_request(
                f"r{number}", prompt, max_tokens=max_tokens, n=n, priority=priority, arrival_s=float(number)
            )
            requests[request.request_id] = request
            scheduler.add(request)
        elif event[0] == "abort":
            take(scheduler.abort(f"r{event[1]}"))
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
            if other_id != request_id:
                continue
            wanted = expected_tokens(request.prompt_token_ids, wanted_len, index)
            assert tokens == wanted[: len(tokens)]
            if reasons[other_id, index] is FinishReason.LENGTH:
                assert tokens == wanted
        ended = [reason for (other_id, _), reason in reasons.items() if other_id == request_id]
        assert ended
        if FinishReason.ABORT not in ended:
            assert len(ended) == params.n
