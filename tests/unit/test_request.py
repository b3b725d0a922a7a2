"""Sequence statuses follow one transition table; prompts are checked; deltas say what is new."""

from __future__ import annotations

from itertools import product

import pytest

from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import SampledToken, TokenLogprobs
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.request import TRANSITIONS, FinishReason, Sequence, SequenceStatus
from shoal_replica.request_checks import check_prompt
from shoal_replica.testing import make_request


def sequence(token_ids: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return Sequence(seq_id=0, request=make_request(prompt_token_ids=(1, 2, 3)), index=0, token_ids=list(token_ids))


@pytest.mark.parametrize(("before", "after"), list(product(SequenceStatus, SequenceStatus)))
def test_only_the_tables_moves_are_possible(before: SequenceStatus, after: SequenceStatus) -> None:
    moving = sequence()
    moving.status = before
    if after in TRANSITIONS[before]:
        moving.move(after)
        assert moving.status is after
    else:
        with pytest.raises(RuntimeError, match=f"{before.value} cannot become {after.value}"):
            moving.move(after)
        assert moving.status is before


def test_an_end_is_final_and_can_always_come() -> None:
    assert not TRANSITIONS[SequenceStatus.FINISHED]
    live = set(SequenceStatus) - {SequenceStatus.FINISHED}
    assert all(SequenceStatus.FINISHED in TRANSITIONS[status] for status in live)


def test_counts() -> None:
    half_way = sequence((1, 2, 3, 8, 9))
    assert (half_way.num_tokens, half_way.num_prompt_tokens, half_way.num_output_tokens) == (5, 3, 2)


def test_hashes_follow_the_tokens() -> None:
    growing = sequence()
    growing.extend_hashes(2)
    growing.token_ids += [8, 9]
    growing.extend_hashes(2)
    assert growing.block_hashes == hash_blocks([1, 2, 3, 8, 9], 2)


def test_a_delta_is_the_last_token() -> None:
    logprobs = TokenLogprobs(9, -0.5)
    delta = sequence((1, 2, 3, 8, 9)).delta(0, [SampledToken(0, 9, logprobs)], FinishReason.LENGTH)
    assert (delta.position, delta.token_ids, delta.logprobs) == (1, (9,), (logprobs,))
    assert delta.finish_reason is FinishReason.LENGTH


def test_an_end_without_a_token_comes_after_the_last() -> None:
    delta = sequence((1, 2, 3, 8, 9)).delta(0, (), FinishReason.ABORT)
    assert (delta.position, delta.token_ids, delta.logprobs) == (2, (), ())


@pytest.mark.parametrize("prompt", [(0,), (9,) * 7, (0, 9)])
def test_good_prompts(prompt: tuple[int, ...]) -> None:
    check_prompt(prompt, max_model_len=8, vocab_size=10)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), "at least one token"),
        ((1,) * 8, "got '8 tokens'; must be at most 7 tokens"),
        ((1, -1), "got -1; token ids must be in [0, 10)"),
        ((10, 1), "got 10; token ids must be in [0, 10)"),
    ],
)
def test_bad_prompts(prompt: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_prompt(prompt, max_model_len=8, vocab_size=10)
    assert caught.value.field == "prompt"
    assert words in str(caught.value)
