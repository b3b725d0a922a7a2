"""The tokens of bad words: within other text, and at the beginning of a word where that is another token."""

from __future__ import annotations

from typing import cast

import pytest

from shoal_replica.bad_words import ban_words
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.tokenizer import Tokenizer

SPELLED = {
    "ugly": (1,), " ugly": (2,),  # one token each
    "two parts": (3, 4), " two parts": (5, 4),
    "never": (6,), " never": (7, 6),  # the space is a token of its own
    "same": (8, 9), " same": (8, 10),  # begins with the same token
}  # fmt: skip


class WordTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        assert not add_special_tokens
        return SPELLED[text]


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (("ugly",), ((1,), (2,))),
        (("  ugly", "ugly"), ((1,), (2,))),
        (("two parts",), ((3, 4), (5, 4))),
        (("never",), ((6,),)),
        (("same",), ((8, 9),)),
        (("never", "two parts"), ((6,), (3, 4), (5, 4))),
    ],
)
def test_spellings(words: tuple[str, ...], banned: tuple[tuple[int, ...], ...]) -> None:
    params = ban_words(SamplingParams(bad_words=words), cast("Tokenizer", WordTokenizer()))
    assert (params.bad_words, params.bad_token_ids) == ((), banned)


def test_sequences_that_are_known_stay() -> None:
    params = ban_words(
        SamplingParams(bad_words="never", bad_token_ids=((5,), (6,))), cast("Tokenizer", WordTokenizer())
    )
    assert params.bad_token_ids == ((5,), (6,))
    assert ban_words(params, cast("Tokenizer", WordTokenizer())) is params
