"""Answers in random pieces: what was written is read, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from fixtures.tool_formats import TOOLS, read, spell
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.chat.chat_format import GLM, HERMES, LLAMA, MINIMAX, MISTRAL, CallFormat

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
        *((GLM, ""), (GLM, "lines"), (MINIMAX, "")),
    ],
)
@given(data=st.data())
def test_what_was_called_is_read(call_format: CallFormat, style: str, data: st.DataObject) -> None:
    made = data.draw(calls)
    content = "" if call_format is LLAMA else data.draw(said)
    if style == "xml" or call_format in (
        GLM,
        MINIMAX,
    ):  # values are text or numbers: white space at their ends, and text like JSON, cannot be told
        plain = st.text("xyz <\n", max_size=9).map(lambda text: f"x{text}x") | st.integers()
        made = [(name, {key: data.draw(plain) for key in arguments}) for name, arguments in made]
    text = content + spell(call_format, made, style)
    told, reasoning, found = read(pieces(text, data.draw(cuts)), call_format)
    assert (told, reasoning) == (content, "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == made


NOISE = (
    *'ab{}[]":,\\ \n<>',
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>", "get_weather"),
    *('{"name": "get_weather"', '"arguments": {', "<function=get_weather>", "<parameter=city>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="get_weather">', '<parameter name="city">', "</invoke>"),
)
noise = st.lists(st.sampled_from(NOISE), max_size=24).map("".join)


@given(noise, cuts, st.sampled_from([HERMES, LLAMA, MISTRAL, GLM, MINIMAX]), st.booleans(), st.booleans())
def test_pieces_add_up_to_the_same(
    text: str, places: list[int], call_format: CallFormat, reasons: bool, is_reasoning: bool
) -> None:
    whole = read([text], call_format, reasons=reasons, is_reasoning=reasons and is_reasoning)
    assert read(pieces(text, places), call_format, reasons=reasons, is_reasoning=reasons and is_reasoning) == whole
    if not (whole[2] or reasons):
        assert whole[0] == text  # nothing is lost
