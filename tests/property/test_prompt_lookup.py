"""Drafts against a dumb search through the sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.prompt_lookup import MAX_MATCH, look_up

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def dumb(tokens: list[int], max_drafts: int, ends: set[int]) -> tuple[int, tuple[int, ...]]:
    for length in range(min(MAX_MATCH, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                period = len(tokens) - start - length
                drafts = [tokens[start + length + i % period] for i in range(max_drafts)]
                end = next((i for i, token in enumerate(drafts) if token in ends), max_drafts)
                return length, tuple(drafts[:end])
    return 0, ()


@given(tokens=texts, max_drafts=st.integers(1, 20), ends=st.sets(st.integers(2, 5), max_size=2))
def test_the_longest_and_of_those_the_latest_match_is_found(tokens, max_drafts, ends):
    assert look_up(np.array(tokens, np.int64), max_drafts, ends) == dumb(tokens, max_drafts, ends)


def test_a_sequence_that_repeats_itself_goes_on_so() -> None:
    assert look_up(np.array([9, 1, 2, 1, 2]), 5) == (2, (1, 2, 1, 2, 1))
    assert look_up(np.array([4, 4]), 3) == (1, (4, 4, 4))
