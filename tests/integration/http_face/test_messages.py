"""Anthropic's API over a scripted core: real uvicorn, the real anthropic client, loopback."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from functools import reduce
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from fixtures.fake_gateway import MAX_MODEL_LEN, MODEL, TOKENIZER, FakeGateway
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import ToolCall
from shoal_cluster.serve.call import Chunk, Usage
from shoal_cluster.serve.http.encoding import encode
from shoal_cluster.serve.http.messages_answers import GrowingMessage
from shoal_cluster.serve.http.messages_types import MessagesRequest
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import DeadlineExceeded, EngineDead, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.request import FinishReason

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": HI}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a place.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLED: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "f"}
DEEP: dict[str, Any] = reduce(lambda inner, _: {"a": inner}, range(900), {})
THOUGHT_AND_CALLS = f"<think>Where?</think>Let me see.{CALL}\n{CALL.replace('Paris', 'Rome')}"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def messages_of(core: FakeGateway) -> tuple[Message, ...]:
    """Those of the last call."""
    messages = core.calls[-1].messages
    assert messages is not None
    return messages


async def test_a_message(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    told = await client.messages.create(**ASKED)
    (block,) = told.content
    assert (told.type, told.role, told.model, told.stop_reason, told.stop_sequence) == (
        "message",
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    assert (block.type, block.text) == ("text", core.text)
    num_prompt = len(TOKENIZER.encode(TOKENIZER.apply_chat_template(HI)))
    usage = told.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - 2, 2)
    assert usage.output_tokens == len(TOKENIZER.encode(core.text))
    assert told.id == f"msg_{core.calls[0].request_id}"
    assert told._request_id == core.calls[0].request_id
    assert messages_of(core) == (Message("user", "hi"),)
    assert core.calls[0].tools is None


async def test_a_stream_is_the_whole_in_parts(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        events = [event async for event in stream]
        told = await stream.get_final_message()
    kinds = [event.type for event in events]
    begun, usage = events[0].message.usage, whole.usage
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (usage.input_tokens, usage.cache_read_input_tokens)
    assert begun.output_tokens == 0 < begun.input_tokens
    assert told.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert kinds.count("content_block_delta") > 1


@pytest.mark.parametrize("num_merged", [1, 3, 1000])
async def test_thoughts_and_calls_are_blocks(
    client: anthropic.AsyncAnthropic, core: FakeGateway, num_merged: int
) -> None:
    core.text, core.num_merged = THOUGHT_AND_CALLS, num_merged
    asked = ASKED | {"max_tokens": 1000, "tools": [WEATHER]}
    whole = await client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = whole.content
    assert (thought.thinking, text.text.strip(), whole.stop_reason) == ("Where?", "Let me see.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
    ]
    assert len({call.id for call in calls}) == 2
    async with client.messages.stream(**asked) as stream:
        told = await stream.get_final_message()
    assert _without_ids(told) == _without_ids(whole)
    use = core.calls[-1].tools
    assert use is not None
    assert (use.tools[0].parameters, use.mode, use.parallel) == (WEATHER["input_schema"], "auto", True)


def _without_ids(message: anthropic.types.Message) -> dict[str, Any]:
    body = message.model_dump(exclude={"id"})
    return body | {"content": [block | {"id": None} for block in body["content"]]}


async def test_a_conversation_with_tools(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    """What the assistant did is one turn; results come before what the user says with them."""
    core.text, core.max_model_len = f"<think>Where?</think>Let me see.{CALL}", 1000
    asked = ASKED | {"max_tokens": 1000, "tools": [WEATHER]}
    first = await client.messages.create(**asked)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]},
        {"type": "tool_result", "tool_use_id": "other", "content": "Sun.", "is_error": False},
        {"type": "tool_result", "tool_use_id": "none"},
        {"type": "text", "text": "And tomorrow?"},
    ]
    await client.messages.create(**asked | {"messages": [*HI, first.to_param(), {"role": "user", "content": results}]})
    said = first.content[1].text
    assert messages_of(core) == (
        Message("user", "hi"),
        Message("assistant", said, (ToolCall(call.id, "get_weather", '{"city": "Paris"}'),), reasoning="Where?"),
        Message("tool", "Rain.", tool_call_id=call.id),
        Message("tool", "Sun.", tool_call_id="other"),
        Message("tool", "", tool_call_id="none"),
        Message("user", "And tomorrow?"),
    )
    assert core.calls[-1].prompt_end is PromptEnd.ANSWER


async def test_what_the_system_says(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    """A line that differs from request to request is left out; what comes amid the chat stays there: either would keep
    prefixes from being found.
    """
    billing = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    for number, system in enumerate(
        (
            "Be brief.\n\nBe kind.",
            [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", "cache_control": None}],
            f"{billing.format(1)}\nBe brief.\n\nBe kind.",
            [{"type": "text", "text": text} for text in (billing.format(2), "Be brief.", "Be kind.")],
        )
    ):
        await client.messages.create(**ASKED | {"system": system})
        assert messages_of(core) == (Message("system", "Be brief.\n\nBe kind."), Message("user", "hi")), number
    await client.messages.create(**ASKED | {"system": billing.format(3)})
    assert messages_of(core) == (Message("user", "hi"),)
    chat = [
        *HI,
        {"role": "system", "content": "9 tokens left"},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes?"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    await client.messages.create(**ASKED | {"messages": chat})
    assert messages_of(core) == (
        Message("user", "hi\n9 tokens left"),
        Message("assistant", "Yes?"),
        Message("user", "a\nb\nc"),
    )


async def test_an_answer_goes_on_with_the_assistants_last_turn(
    client: anthropic.AsyncAnthropic, core: FakeGateway
) -> None:
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": " sea"}]
    for begun in ("The sea", parts):
        await client.messages.create(**ASKED | {"messages": [*HI, {"role": "assistant", "content": begun}]})
        assert core.calls[-1].prompt_end is PromptEnd.CONTINUED
        assert messages_of(core)[-1] == Message("assistant", "The sea")


async def test_what_else_clients_send(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    schema = {"type": "object", "properties": None, "required": None}
    tool = {"name": f"mcp__server__{'x' * 100}", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    more = {"thinking": {"type": "between_tools"}, "output_format": form}
    more["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await client.messages.create(**ASKED | {"messages": [{"role": "system", "content": "S"}, *HI]}, extra_body=more)
    assert messages_of(core) == (Message("system", "S"), Message("user", "hi"))
    assert core.calls[-1].template_options["enable_thinking"]
    assert core.calls[-1].sampling_params.structured_output is not None
    await client.messages.create(**ASKED, tools=[tool], extra_query={"beta": "true"})
    use = core.calls[-1].tools
    assert use is not None
    assert use.tools[0].parameters == {"type": "object"}


async def test_how_answers_end(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    for reason, limit, told in (
        ("END", 64, ("stop_sequence", "END")),
        (7, 64, ("end_turn", None)),  # a token that no client of this API has asked for
        ("END", 3, ("max_tokens", None)),
    ):
        core.stop_reason = reason
        answer = await client.messages.create(**ASKED | {"max_tokens": limit, "stop_sequences": ["END", "FIN"]})
        assert (answer.stop_reason, answer.stop_sequence) == told
        async with client.messages.stream(**ASKED | {"max_tokens": limit}) as stream:
            last = await stream.get_final_message()
        assert (last.stop_reason, last.stop_sequence) == told
    assert core.calls[0].sampling_params.stop == ("END", "FIN")


async def test_what_is_asked_reaches_the_core(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.messages.create(
        **ASKED,
        metadata={"user_id": "someone"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40, "priority": -2, "cache_salt": "salt"}
        | {"chat_template_kwargs": {"thinking": False, "more": 1}},
    )
    call = core.calls[0]
    params = call.sampling_params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (64, 0.5, 0.9, 40)
    assert params.structured_output is not None
    assert json.loads(params.structured_output.source) == schema
    assert (call.tenant, call.priority, call.cache_salt) == ("someone", -2, "salt")
    assert call.template_options == {"enable_thinking": True, "thinking": False, "reasoning_effort": "low", "more": 1}
    await client.messages.create(**ASKED, thinking={"type": "disabled"}, extra_headers={"x-tenant": "team"})
    assert core.calls[1].template_options == {"enable_thinking": False, "thinking": False}
    assert core.calls[1].tenant == "team"


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "", False)),
        ({"type": "tool", "name": "get_weather"}, ("required", "get_weather", False)),
        ({"type": "none"}, ("none", "", True)),
    ],
)
async def test_which_tools_may_be_called(
    client: anthropic.AsyncAnthropic, core: FakeGateway, choice: Any, told: tuple[str, str, bool]
) -> None:
    await client.messages.create(**ASKED, tools=[WEATHER | {"type": "custom", "strict": True}], tool_choice=choice)
    use = core.calls[0].tools
    assert use is not None
    assert (use.mode, use.named, use.parallel) == told
    assert use.tools[0].strict


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    asked = {"model": MODEL, "messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(**asked)
    answer = await client.messages.create(max_tokens=1, **asked)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages: got \[\]; must have at least one"):
        await client.messages.count_tokens(**asked | {"messages": [], "system": ""})
    assert core.num_unread == 0


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: got None; input should be a valid integer"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: got 0; input should be greater than or equal"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            400,
            "invalid_request_error",
            "context_management.edits.0: got",
        ),
        ({"messages": []}, 400, "invalid_request_error", "messages: got []; must have at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages.0.role: got 'tool'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error", "messages.0.content: got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type: got 'image'; only text, thinking, tool_use and tool_result are served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "id": "1"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type: got 'tool_use'",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]},
            400,
            "invalid_request_error",
            "messages.1.content.0.name: got None; must be set",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.content: got 'image'; only parts of text are served",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "tools.0.type: got 'web_search_20250305'; only tools of the client's own",
        ),
        (
            {"tools": [WEATHER | {"input_schema": {"type": "array"}}]},
            400,
            "invalid_request_error",
            "tools.0.input_schema.type: got 'array'; must be 'object'",
        ),
        ({"tools": [WEATHER | {"name": "no name"}]}, 400, "invalid_request_error", "tools.0.name: got 'no name'"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice: got 'any'; needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool"}},
            400,
            "invalid_request_error",
            "tool_choice.name: got None; must be set",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences: got"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature: got -1"),
        ({"mcp_servers": [{"name": "x"}]}, 400, "invalid_request_error", "mcp_servers: got [{'name': 'x'}]; is not"),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system: got 'image'; only parts of text"),
        ({"messages": [], "system": "x"}, 400, "invalid_request_error", "messages: got []; must have at least one"),
        (
            {"messages": [*HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": []}]},
            400,
            "invalid_request_error",
            "messages.2.content: got []; must not be empty",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [CALLED | {"input": {"a": "\ud83d"}}]}]},
            400,
            "invalid_request_error",
            "messages.1.content.0.input: got '{",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [CALLED | {"input": DEEP}]}]},
            400,
            "invalid_request_error",
            "messages.1.content.0.input: got 'dict'; must be nested at most",
        ),
        ({"thread": {"type": "continue"}}, 400, "invalid_request_error", "thread: got {'type': 'continue'}; is not"),
        ({"model": "other"}, 404, "not_found_error", "'other' is not served here"),
        (
            {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]},
            400,
            "invalid_request_error",
            f"must be below {MAX_MODEL_LEN} tokens",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3 * 64 * 1024}]}, 413, "request_too_large", "at most"),
    ],
)
async def test_bad_input_has_anthropics_error_body(
    http: httpx.AsyncClient, core: FakeGateway, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    content = json.dumps(ASKED | body)  # in ASCII, which can spell what UTF-8 cannot
    answer = await http.post(MESSAGES, content=content, headers={"content-type": "application/json"})
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), told
    assert said in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]
    assert core.num_unread + core.num_refused == 1
    assert not core.calls


async def test_what_is_no_json_and_a_wrong_method(http: httpx.AsyncClient) -> None:
    answer = await http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await http.get(MESSAGES)).json()["error"]["message"] == "Method Not Allowed"
    assert (await http.post(f"{MESSAGES}/none")).json()["error"]["type"] == "not_found_error"
    assert "error" in (await http.post(f"{MESSAGES}2")).json()  # not this API: OpenAI's words
    assert "type" not in (await http.post(f"{MESSAGES}2")).json()


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ResourceExhausted("all busy", retry_after_s=1.5), 429, "rate_limit_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (Unavailable("no replica"), 503, "overloaded_error"),
        (EngineDead("it died"), 503, "overloaded_error"),
        (RuntimeError("a secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_core_have_their_type(
    http: httpx.AsyncClient, core: FakeGateway, error: Exception, status: int, kind: str, stream: bool
) -> None:
    core.error = error
    answer = await http.post(MESSAGES, json=ASKED | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 429)
    assert "secret" not in answer.text


async def test_an_error_amid_a_stream_is_its_last_event(client: anthropic.AsyncAnthropic, core: FakeGateway) -> None:
    core.error, core.error_after = Unavailable("no replica"), 3
    stream, seen = await client.messages.create(**ASKED, stream=True), list[str]()

    async def read() -> None:
        async for event in stream:
            seen.append(event.type)

    with pytest.raises(anthropic.APIStatusError, match="no replica"):
        await read()
    assert seen == ["message_start", "content_block_start", *["content_block_delta"] * 3]


async def test_a_client_that_goes_away_closes_the_cores_stream(http: httpx.AsyncClient, core: FakeGateway) -> None:
    core.gate.clear()
    async with http.stream("POST", MESSAGES, json=ASKED | {"stream": True}) as answer:
        await anext(answer.aiter_lines())
    await until(lambda: core.num_closed_early == 1)


async def test_the_key_of_this_api_goes_first(http: httpx.AsyncClient, core: FakeGateway) -> None:
    core.api_keys = {"alice": "sk-a"}
    both = {"x-api-key": "sk-a", "authorization": "Bearer other"}
    assert (await http.post(MESSAGES, json=ASKED, headers=both)).status_code == 200
    assert (await http.get("/v1/models", headers=both)).status_code == 401
    assert (await http.get("/v1/models", headers={"x-api-key": "sk-a"})).status_code == 200


async def test_a_refused_request_id_is_not_told_again(http: httpx.AsyncClient, core: FakeGateway) -> None:
    answer = await http.post(MESSAGES, json=ASKED, headers={"x-request-id": "a b"})
    told = answer.json()
    assert (answer.status_code, told["error"]["type"]) == (400, "invalid_request_error")
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert told["request_id"] not in ("", "a b")
    assert core.last_unread == (told["request_id"], "InvalidArgument")


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_keys_come_in_either_header(http: httpx.AsyncClient, core: FakeGateway, header: str) -> None:
    core.api_keys = {"alice": "sk-a"}
    key = {"x-api-key": "{}", "authorization": "Bearer {}"}[header]
    for given, status in (("sk-a", 200), ("sk-b", 401)):
        answer = await http.post(MESSAGES, json=ASKED, headers={header: key.format(given)})
        assert answer.status_code == status
    assert answer.json()["error"]["type"] == "authentication_error"
    assert core.calls[0].tenant == "alice"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', None),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": 1e999}', None),
        ('{"a": "\\ud83d"}', None),
        ("[" * 5000, None),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_arguments_that_are_no_object(arguments: str, told: dict[str, Any] | None) -> None:
    """A call that was cut, or that JSON cannot spell, is told as it came, in an object, which clients rely on."""
    told = {"INVALID_JSON": arguments} if told is None else told
    answer = GrowingMessage(MessagesRequest(**ASKED), "id", MODEL, MAX_MODEL_LEN)
    answer.take(Chunk(index=0, tool_calls=(CallPiece(0, "", "c", "f"), CallPiece(0, arguments))))
    answer.take(Chunk(index=0, finish_reason=FinishReason.LENGTH))
    assert answer.body()["content"] == [{"type": "tool_use", "input": told, "id": "c", "name": "f"}]
    encode(answer.body())


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "told"),
    [
        (MAX_MODEL_LEN - 9, 9, "model_context_window_exceeded"),
        (MAX_MODEL_LEN - 64, 64, "max_tokens"),
        (10, 3, "max_tokens"),  # a structured answer that cannot be completed
    ],
)
async def test_why_an_answer_was_cut(num_prompt: int, num_output: int, told: str) -> None:
    usage = Usage(
        num_prompt_tokens=num_prompt, num_cached_tokens=0, num_output_tokens=num_output, replica_id="r", ttft_s=0.0
    )
    answer = GrowingMessage(MessagesRequest(**ASKED), "id", MODEL, MAX_MODEL_LEN)
    answer.take(Chunk(index=0, finish_reason=FinishReason.LENGTH, usage=usage))
    assert answer.body()["stop_reason"] == told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error_after", [0, 2])
async def test_errors_of_the_core_name_this_apis_fields(
    http: httpx.AsyncClient, core: FakeGateway, stream: bool, error_after: int
) -> None:
    core.error, core.error_after = InvalidArgument("structured_output", "x", "must be another"), error_after
    text = (await http.post(MESSAGES, json=ASKED | {"stream": stream})).text
    assert "output_config.format: got 'x'; must be another" in text
    assert "structured_output" not in text


@pytest.mark.parametrize("kind", ["text", "tool_use", "turns"])
async def test_many_parts_take_no_longer_each(kind: str) -> None:
    """Ten times as many would take a hundred times as long if each were joined to all before it."""
    parts = {
        "text": {"type": "text", "text": "x"},
        "tool_use": {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    }

    def body(number: int) -> MessagesRequest:
        if kind == "turns":
            return MessagesRequest(**ASKED | {"messages": [{"role": "user", "content": "x"}] * number})
        role = "user" if kind == "text" else "assistant"
        return MessagesRequest(**ASKED | {"messages": [*HI, {"role": role, "content": [parts[kind]] * number}]})

    def took(number: int) -> float:
        asked, times = body(number), []
        for _ in range(3):
            started = time.process_time()
            asked.to_calls("id")
            times.append(time.process_time() - started)
        return min(times)

    assert took(9_000) < 40 * took(900)
