"""Beam searches in a crowded pool: each gets the beams that it would get alone, and none waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.finish_rule import FinishRule
from shoal_replica.testing import expected_beams, expected_tokens, make_request, make_scheduler

MAX_MODEL_LEN = 40

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=20),
        st.integers(1, 14),  # max_tokens
        st.integers(1, 5),  # beam_width; 1 is a plain request
        st.integers(0, 3),  # the step before which it arrives
    ),
    min_size=1,
    max_size=8,
)


@given(
    requests=requests,
    num_spare=st.integers(0, 12),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(5, 9),
    caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 6]),
)
def test_all_end_with_the_beams_that_they_would_have_alone(
    requests, num_spare, block_size, max_num_seqs, caching, num_host_blocks
):
    """The pool is what the largest of them needs, and a few blocks more."""
    made = [
        make_request(str(number), prompt, max_tokens=max_tokens, beam_width=width, n=width, arrival_s=float(arrives))
        for number, (prompt, max_tokens, width, arrives) in enumerate(requests)
    ]
    scheduler, executor = make_scheduler(
        num_blocks=max(max(_num_blocks(request, block_size) for request in made), -(-MAX_MODEL_LEN // block_size))
        + num_spare,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2 * max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
        num_host_blocks=num_host_blocks if caching else 0,
    )
    answers: dict[tuple[str, int], list[int]] = {}
    left = sorted(made, key=lambda request: request.arrival_s)
    for step in range(4000):
        while left and left[0].arrival_s <= step:
            scheduler.add(left.pop(0))
        output = scheduler.schedule(float(step))
        scheduler.check_invariants()
        if output is None:
            assert not scheduler.has_work
            if not left:
                break
            continue
        for delta in scheduler.update(output, executor.execute(output), float(step)):
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        scheduler.check_invariants()
    assert not scheduler.has_work
    assert scheduler.stats(0.0).num_allocated_blocks == 0

    for request in made:
        params = request.sampling_params
        if params.is_beam_search:
            expected = expected_beams(request, FinishRule(frozenset(), MAX_MODEL_LEN))
        else:
            expected = [expected_tokens(request.prompt_token_ids, params.max_tokens)]
        assert [answers[request.request_id, index] for index in range(params.n)] == expected


def _num_blocks(request, block_size):
    """The most that a request can use: its prompt's full blocks once, and all else for each beam."""
    params = request.sampling_params
    shared = request.num_prompt_tokens // block_size
    last = -(-(request.num_prompt_tokens + params.max_tokens) // block_size)
    return shared + params.beam_width * (last - shared)
