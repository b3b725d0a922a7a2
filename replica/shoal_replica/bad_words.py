"""Words that must not be generated, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shoal_replica.sampling_params import SamplingParams
from shoal_replica.tokenizer import Tokenizer


def ban_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with their ``bad_words`` turned into ``bad_token_ids``, as in vLLM: each word as it is spelled within
    other text and at the beginning of a word. A word may still come in tokens that the tokenizer would not choose.
    """
    if not params.bad_words:
        return params
    bad = dict.fromkeys((*params.bad_token_ids, *_spellings(params.bad_words, tokenizer)))
    return replace(params, bad_words=(), bad_token_ids=tuple(bad))


def _spellings(words: Iterable[str], tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
    for word in words:
        word = word.lstrip()
        within, at_beginning = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        yield within
        if at_beginning[:1] != within[:1] and len(at_beginning) == len(within):  # else the space is a token of its own
            yield at_beginning
