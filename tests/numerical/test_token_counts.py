"""The tokens that penalties concern, against a count from the beginning."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_replica.model.token_counts import INITIAL_SIZE, TokenCounts


@given(
    token_ids=st.lists(st.integers(0, 3 * INITIAL_SIZE), max_size=3 * INITIAL_SIZE),
    num_prompt_tokens=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 3 * INITIAL_SIZE), max_size=5),
)
def test_counts_do_not_depend_on_when_they_are_taken(
    token_ids: list[int], num_prompt_tokens: int, cuts: list[int]
) -> None:
    counts, whole = TokenCounts(), np.array(token_ids, np.int64)
    for end in sorted({*(min(cut, len(token_ids)) for cut in cuts), len(token_ids)}):
        counts.extend(whole[:end], num_prompt_tokens)
        seen, generated = (part.tolist() for part in counts.on(torch.device("cpu")))
        expected = Counter(token_ids[num_prompt_tokens:end])
        assert len(seen) == len(set(seen))
        assert set(seen) == set(token_ids[:end])
        assert {token_id: count for token_id, count in zip(seen, generated, strict=True) if count} == expected
