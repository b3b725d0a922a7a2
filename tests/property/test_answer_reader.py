"""Answers in random pieces: what was written is read, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from fixtures.tool_formats import TOOLS, read, spell
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.chat.chat_format import GLM, HERMES, LLAMA, MINIMAX, MISTRAL, QWEN_CODER, CallFormat

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
keys = st.text("abc_", min_size=1, max_size=4)
calls = st.lists(
    st.tuples(st.sampled_from([tool.name for tool in TOOLS]), st.dictionaries(keys, values, max_size=3)),
    min_size=1,
    max_size=3,
)
said = st.text("ab <{[\n", max_size=12).map(str.strip)
cuts = st.lists(st.integers(0, 400), max_size=60)


def pieces(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[start:end] for start, end in pairwise(ends)] or [text]


@pytest.mark.parametrize(
    ("call_format", "style"),
    [
        *((HERMES, ""), (HERMES, "xml"), (LLAMA, ""), (MISTRAL, ""), (MISTRAL, "args")),
        *((GLM, ""), (GLM, "lines"), (MINIMAX, ""), (QWEN_CODER, "bare")),
    ],
)
@given(data=st.data())
def test_what_was_called_is_read(call_format: CallFormat, style: str, data: st.DataObject) -> None:
    made = data.draw(calls)
    content = "" if call_format is LLAMA else data.draw(said)
    if style in ("xml", "bare") or call_format in (GLM, MINIMAX):
        # Values are text or numbers: white space at their ends, and text like JSON, cannot be told.
        plain = st.text("xyz <\n", max_size=9).map(lambda text: f"x{text}x") | st.integers()
        made = [(name, {key: data.draw(plain) for key in arguments}) for name, arguments in made]
    text = content + spell(call_format, made, style)
    told, reasoning, found = read(pieces(text, data.draw(cuts)), call_format)
    assert (told, reasoning) == (content, "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == made


NOISE = (
    *'ab{}[]":,;\\ \n\xa0<>',
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "get_weather",
    ),
    *('{"name": "get_weather"', '"arguments": {', "<function=get_weather>", "<parameter=city>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="get_weather">', '<parameter name="city">', "</invoke>", '<invoke name="a b">'),
    *("<function=", "<function=my func>", "<function=foo>\n", "</function>", '{"name": "a b"', "\n<parameter=days>3"),
    *('{"name": "what-time.is_it"}', "<tool_call><function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n"),
)
noise = st.lists(st.sampled_from(NOISE), max_size=24).map("".join)


formats = st.sampled_from([HERMES, LLAMA, MISTRAL, GLM, MINIMAX, QWEN_CODER])


@given(noise, cuts, formats, st.booleans(), st.booleans(), st.booleans())
def test_pieces_add_up_to_the_same(
    text: str, places: list[int], call_format: CallFormat, reasons: bool, is_reasoning: bool, is_json: bool
) -> None:
    how = {"reasons": reasons, "is_reasoning": reasons and is_reasoning, "is_json": is_json}
    whole = read([text], call_format, **how)
    assert read(pieces(text, places), call_format, **how) == whole
    assert read([*text, ""], call_format, **how) == whole
    if not (whole[2] or reasons):
        assert whole[0] == text  # nothing is lost


@given(noise, cuts, formats)
def test_an_answer_in_json_is_not_searched_for_calls(text: str, places: list[int], call_format: CallFormat) -> None:
    answer = json.dumps({"text": text}, ensure_ascii=False)
    assert read(pieces(answer, places), call_format, is_json=True) == (answer, "", [])
