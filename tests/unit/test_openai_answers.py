"""Tokens' log-probabilities in the format of OpenAI completions."""

from __future__ import annotations

from fixtures.tiny_tokenizer import BOS, tiny_tokenizer

from shoal_cluster.serve.http.openai_echo import Echo
from shoal_cluster.serve.http.openai_shapes import CompletionShape
from shoal_replica.executor import TokenLogprobs

TOKENIZER = tiny_tokenizer()
SHAPE = CompletionShape(TOKENIZER.token_bytes)


def test_special_tokens_before_an_echo_have_no_width() -> None:
    prompt = TOKENIZER.encode("then", add_special_tokens=False)
    bos = TOKENIZER.token_id(BOS)
    assert bos is not None
    echo = Echo("then", (bos, *prompt), is_all=False)
    body, offset = SHAPE.prompt_logprobs(echo, [TokenLogprobs(i, -1.0) for i in prompt])
    assert body["tokens"] == [BOS, "the", "n"]
    assert (body["text_offset"], offset) == ([0, 0, 3], 4)
    assert body["token_logprobs"] == [None, -1.0, -1.0]


def test_offsets_count_characters_however_tokens_cut_them() -> None:
    tokens = [TokenLogprobs(token_id, -1.0, ()) for token_id in TOKENIZER.encode("the👧!é")]
    body, offset = SHAPE.logprobs(tokens, 0)
    assert body["text_offset"] == [0, 3, 3, 3, 3, 4, 5, 5]
    assert offset == len("the👧!é")
    assert SHAPE.logprobs(tokens[2:], 4)[0]["text_offset"] == body["text_offset"][2:]


def test_the_token_that_was_taken_is_among_the_likeliest() -> None:
    a, b = TOKENIZER.encode("ab")
    for top, told in (((), {"a": -3.0}), (((b, -0.1),), {"b": -0.1, "a": -3.0}), (((a, -3.0),), {"a": -3.0})):
        assert SHAPE.logprobs([TokenLogprobs(a, -3.0, top)], 0)[0]["top_logprobs"] == [told]
