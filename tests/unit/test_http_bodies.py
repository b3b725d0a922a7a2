"""Bodies of requests that are wrong in many places are refused for the first."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from shoal_cluster.serve.http.answers import AskingBody
from shoal_cluster.serve.http.encoding import event
from shoal_cluster.serve.http.fields import Body
from shoal_cluster.serve.http.messages_types import Conversation, MessagesRequest
from shoal_cluster.serve.http.openai_chat import ChatRequest
from shoal_cluster.serve.http.openai_types import CompletionRequest
from shoal_cluster.serve.http.responses_types import ResponsesRequest
from shoal_cluster.serve.http.tokens import DetokenizeBody, TokenizeBody
from shoal_replica.errors import InvalidArgument

MANY: Any = [0] * 100
FORM: Any = {"format": {"type": "json_object"}}
HI: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatRequest, HI | {"tools": MANY}),
        (ChatRequest, HI | {"bad_words": MANY}),
        (ChatRequest, HI | {"allowed_token_ids": ["x"] * 100}),
        (ChatRequest, HI | {"logit_bias": {f"{n}": "x" for n in range(2000)}}),
        (ChatRequest, HI | {"chat_template_kwargs": {f"\ud800{n}": 0 for n in range(2000)}}),
        (CompletionRequest, {"prompt": "x", "stop": MANY}),
        (ResponsesRequest, {"input": MANY}),
        (ResponsesRequest, {"input": "x", "metadata": {f"{n}": 0 for n in range(2000)}}),
        (MessagesRequest, {"messages": MANY, "max_tokens": 1}),
        (Conversation, {"messages": [{"role": "user", "content": MANY}]}),
        (TokenizeBody, {"messages": MANY}),
        (DetokenizeBody, {"tokens": ["x"] * 100}),
    ],
)
def test_wrong_elements_are_not_all_looked_at(kind: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 2  # a union's other alternative is the second


@pytest.mark.parametrize(
    ("kind", "body", "field", "expected"),
    [
        (ChatRequest, HI, "structured_output", "response_format"),
        (ChatRequest, HI | {"guided_regex": "a"}, "structured_output", "guided_regex"),
        (ChatRequest, HI, "text", "messages"),
        (CompletionRequest, {"prompt": "x"}, "text", "prompt"),
        (ResponsesRequest, {"input": "x"}, "messages", "input"),
        (
            ChatRequest,
            HI | {"response_format": {"type": "text"}, "guided_regex": "("},
            "structured_output",
            "guided_regex",
        ),
        (ChatRequest, HI, "tenant", "user"),
        (MessagesRequest, HI | {"max_tokens": 1}, "tenant", "metadata.user_id"),
        (ResponsesRequest, {"input": "x", "text": FORM}, "structured_output", "text.format"),
        (MessagesRequest, HI | {"max_tokens": 1}, "prompt", "messages"),
        (ChatRequest, HI, "top_p", "top_p"),
    ],
)
def test_errors_name_the_bodys_own_fields(
    kind: type[AskingBody], body: dict[str, Any], field: str, expected: str
) -> None:
    error = kind.model_validate(body).in_its_words(InvalidArgument(field, "x", "must be y"))  # type: ignore[attr-defined]
    assert isinstance(error, InvalidArgument)
    assert (error.field, str(error)) == (expected, f"{expected}: got 'x'; must be y")


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\x85d", "ö", "a\n"])
def test_no_client_sees_the_end_of_a_line_within_an_event(text: str) -> None:
    """Those of Python take more characters for one than server-sent events do."""
    lines = [*httpx.Response(200, content=event({"text": text})).iter_lines()]
    assert [json.loads(line.removeprefix("data: ")) for line in lines if line] == [{"text": text}]


def test_parts_of_a_text_are_on_lines_of_their_own() -> None:
    parts = [{"type": "text", "text": "File: notes.txt"}, {"type": "text", "text": "Sum it up."}]
    (chat,) = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]}).to_calls("x")
    inputs = [{"role": "user", "content": [part | {"type": "input_text"} for part in parts]}]
    (response,) = ResponsesRequest.model_validate({"input": inputs}).to_calls("x")
    for call in (chat, response):
        assert call.messages is not None
        assert call.messages[0].content == "File: notes.txt\nSum it up."
