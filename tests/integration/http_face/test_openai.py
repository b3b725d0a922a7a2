"""OpenAI's API over a scripted core: real uvicorn, the real openai client, loopback."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from fixtures.fake_gateway import ADAPTER, MAX_MODEL_LEN, MODEL, TOKENIZER, FakeGateway
from fixtures.tiny_tokenizer import BOS
from fixtures.tool_formats import WEATHER
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import ToolCall
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.feed_messages import Submit, frames_from_gateway
from shoal_cluster.serve.http import openai_whole
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import DeadlineExceeded, EngineDead, ResourceExhausted, Unavailable
from shoal_replica.frames import frame
from shoal_replica.sampling_defaults import DEFAULTED
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.structured_output import StructuredOutput
from shoal_replica.testing import make_request

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
MANY = {f"{number}": "x" for number in range(1025)}


CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all: starting and stopping it is slow


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
    answer = raw.parse()
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", core.text, "stop")
    assert answer.usage is not None
    num_prompt = len(TOKENIZER.encode(TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        num_prompt,
        len(TOKENIZER.encode(core.text)),
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert raw.headers["x-request-id"] == core.calls[0].request_id
    assert answer.id == f"chatcmpl-{core.calls[0].request_id}"


async def test_chat_stream(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options=options)
    events = [event async for event in stream]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == core.text
    assert events[-2].choices[0].finish_reason == "stop"
    assert (events[-1].choices, events[0].usage) == ([], None)
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(TOKENIZER.encode(core.text))
    assert len({event.id for event in events}) == 1


@pytest.mark.parametrize("reason", ["END", 7, None])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_what_has_ended_a_choice_is_told(
    http: httpx.AsyncClient, core: FakeGateway, path: str, reason: str | int | None
) -> None:
    """As vLLM tells it; a choice that is cut has been ended by nothing."""
    core.stop_reason = reason
    asked: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "then"}
    for limits, told in (({}, ("stop", reason)), ({"max_tokens": 1}, ("length", None))):
        (choice,) = (await http.post(path, json=asked | limits)).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == told
        streamed = (await http.post(path, json=asked | limits | {"stream": True})).text.split("\n\n")[:-2]
        *earlier, last = [json.loads(event.removeprefix("data: "))["choices"][0] for event in streamed]
        assert (last["finish_reason"], last["stop_reason"]) == told
        assert not any("stop_reason" in each for each in earlier)
    if path == COMPLETION:
        all_prompt = {"prompt": "then", "echo": True, "max_tokens": 0}
        for body in (all_prompt, all_prompt | {"stream": True}):
            text = (await http.post(path, json=body)).text
            assert '"stop_reason":null' in text
            assert "END" not in text


async def test_stream_without_usage_ends_with_done(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_two_chat_sequences_with_logprobs(client: openai.AsyncOpenAI, core: FakeGateway, stream: bool) -> None:
    entries: dict[int, list[Any]] = {0: [], 1: []}
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2}
    if stream:
        async for event in await client.chat.completions.create(**asked, stream=True):
            for part in event.choices:
                entries[part.index] += part.logprobs.content if part.logprobs else []
    else:
        for choice in (await client.chat.completions.create(**asked)).choices:
            assert choice.message.content == core.text
            assert choice.logprobs is not None
            entries[choice.index] += choice.logprobs.content or []
    for content in entries.values():
        assert b"".join(bytes(entry.bytes) for entry in content) == core.text.encode()
        assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)
        assert content[0].token == "H"
        assert content[-2].token.startswith("bytes:\\x")


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: openai.AsyncOpenAI, core: FakeGateway, stream: bool) -> None:
    core.text = "then"
    answer: Any = await client.completions.create(model=MODEL, prompt="x", logprobs=1, stream=stream)
    parts = [e.choices[0] async for e in answer] if stream else [answer.choices[0]]
    logprobs = [part.logprobs for part in parts if part.logprobs]
    rows = [row for lp in logprobs for row in zip(lp.tokens, lp.text_offset, lp.token_logprobs, strict=True)]
    assert rows == [("the", 0, -0.5), ("n", 3, -0.5)]
    assert [list(top) for lp in logprobs for top in lp.top_logprobs] == [["the"], ["n"]]


@pytest.mark.parametrize("prompt", ["then", [*TOKENIZER.encode("then", add_special_tokens=False)]])
async def test_an_echo_begins_with_its_prompt_and_scores_it(
    client: openai.AsyncOpenAI, core: FakeGateway, prompt: Any
) -> None:
    """As evaluation harnesses ask for it: the first token of the prompt has no log-probability."""
    core.text = "the"
    answer = await client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, n=2)
    for choice in answer.choices:
        assert choice.text == "thenthe"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["the", "n", "the"]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
        assert choice.logprobs.text_offset == [0, 3, 4]
        assert [top and list(top) for top in choice.logprobs.top_logprobs or ()] == [None, ["n"], ["the"]]
    assert core.calls[-1].sampling_params.prompt_logprobs == 1
    plain = await client.completions.create(model=MODEL, prompt=prompt, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("thenthe", None)
    assert core.calls[-1].sampling_params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_may_be_all(client: openai.AsyncOpenAI, core: FakeGateway, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "then"], "echo": True, "max_tokens": 0}
    if stream:
        texts, usage = {0: "", 1: ""}, None
        async for event in await client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = event.usage
            for part in event.choices:
                texts[part.index] += part.text
        assert usage is not None
        assert (list(texts.values()), usage.completion_tokens) == (["ab", "then"], 0)
        return
    core.text = "H"  # which would end by itself
    answer = await client.completions.create(**asked, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["ab", "then"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.token_logprobs == [None, -0.5]
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[-5], [2**40], [1] * 200, ""])
async def test_only_prompts_that_are_served_are_echoed(http: httpx.AsyncClient, prompt: Any, stream: bool) -> None:
    answer = await http.post("/v1/completions", json={"prompt": prompt, "echo": True, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


async def test_what_cannot_be_scored_names_what_the_body_asked_for(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, param in (({"echo": True, "logprobs": 1}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        answer = await http.post("/v1/completions", json={"prompt": "then", "beam_width": 2} | asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    monkeypatch.setattr(openai_whole, "MAX_TOLD", 8)
    body: dict[str, Any] = {"prompt": ["then", "then"], "echo": True, "logprobs": 1, "n": 2}  # 2 x 2 x 2 numbers
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    answer = await http.post("/v1/completions", json=body | {"prompt": ["then"] * 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "must be at most 8; ask for fewer at once" in answer.json()["error"]["message"]


async def test_an_echo_streams_before_the_answer(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    stream = await client.completions.create(model=MODEL, prompt="then ", echo=True, n=2, stream=True)
    texts: dict[int, list[str]] = {0: [], 1: []}
    async for event in stream:
        for part in event.choices:
            texts[part.index].append(part.text)
    for parts in texts.values():
        assert parts[0].startswith("then ")
        assert "".join(parts) == "then " + core.text


async def test_prompt_logprobs_are_told_as_vllm_tells_them(http: httpx.AsyncClient, core: FakeGateway) -> None:
    _, n = TOKENIZER.encode("then", add_special_tokens=False)
    body = {"prompt": "then", "prompt_logprobs": 2, "echo": True, "logprobs": 1, "n": 2}
    answer = (await http.post("/v1/completions", json=body)).json()
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": "n"}
    other = {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.token_bytes(n + 1).decode()}
    for choice in answer["choices"]:
        assert choice["prompt_logprobs"] == [None, {str(n): entry, str(n + 1): other}]
        assert [top and len(top) for top in choice["logprobs"]["top_logprobs"][:2]] == [None, 1]
    assert core.calls[-1].sampling_params.prompt_logprobs == 2
    whole = (await http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 0})).json()
    assert whole["prompt_logprobs"][0] is None
    assert [each["rank"] for told in whole["prompt_logprobs"][1:] for each in told.values()] == [None] * (
        whole["usage"]["prompt_tokens"] - 1
    )
    assert "prompt_logprobs" not in whole["choices"][0]
    with_tools = {"messages": HI, "prompt_logprobs": 0, "tools": [TOOL], "max_tokens": 0, "max_completion_tokens": 5}
    other = (await http.post("/v1/chat/completions", json=with_tools)).json()
    assert len(other["prompt_logprobs"]) == other["usage"]["prompt_tokens"]
    assert other["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", [("ab", None)]),
        (["ab", "c"], [("ab", None), ("c", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_prompts(
    client: openai.AsyncOpenAI, core: FakeGateway, prompt: Any, asked: list[Any], stream: bool
) -> None:
    texts = [""] * (2 * len(asked))
    reasons: dict[int, str] = {}
    answer: Any = await client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=3, stream=stream)

    async def choices() -> AsyncIterator[Any]:
        if stream:
            async for event in answer:
                for choice in event.choices:
                    yield choice
        else:
            for choice in answer.choices:
                yield choice

    async for choice in choices():
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [TOKENIZER.decode(TOKENIZER.encode(core.text)[:3])] * len(texts)
    assert reasons == dict.fromkeys(range(len(texts)), "length")
    assert sorted((c.text or "", c.token_ids or ()) for c in core.calls) == sorted((t or "", i or ()) for t, i in asked)
    assert len({call.request_id for call in core.calls}) == len(asked)


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_schema", '{"type": "object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"a": 1}},
                }
            },
            StructuredOutput("json_schema", '{"a": 1}'),
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, StructuredOutput("json_schema", '{"a": 1}')),
        ({"structured_outputs": {"json": '{"a":1}'}}, StructuredOutput("json_schema", '{"a":1}')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, StructuredOutput("regex", r"a\.b|c")),
        ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutput("lark", "start: A")),
        ({"structured_outputs": {}}, None),
        (
            {"structured_outputs": {"json": None, "regex": "a", "disable_fallback": False, "whitespace_pattern": None}},
            StructuredOutput("regex", "a"),
        ),
        ({"guided_json": {"a": 1}}, StructuredOutput("json_schema", '{"a": 1}')),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput("regex", "a|b")),
        ({"guided_grammar": "start: A", "response_format": None}, StructuredOutput("lark", "start: A")),
    ],
    ids=str,
)
async def test_what_an_answer_must_match(
    http: httpx.AsyncClient, core: FakeGateway, body: dict[str, Any], structure: StructuredOutput | None
) -> None:
    assert (await http.post(CHAT, json={"messages": HI} | body)).status_code == 200
    (call,) = core.calls
    assert call.sampling_params.structured_output == structure
    request = replace(make_request(), sampling_params=call.sampling_params)
    (submit,) = frames_from_gateway().take(frame(Submit(request)))
    assert submit.request.sampling_params.structured_output == structure


async def test_a_huge_max_tokens_is_no_limit_and_fits_the_feed(http: httpx.AsyncClient, core: FakeGateway) -> None:
    answer = await http.post(CHAT, json={"messages": HI, "max_tokens": 10**30, "priority": 2**31 - 1})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    (call,) = core.calls
    request = replace(make_request(priority=call.priority), sampling_params=call.sampling_params)
    (submit,) = frames_from_gateway().take(frame(Submit(request)))
    assert submit.request.sampling_params == call.sampling_params


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}])
async def test_scores_of_a_prompt_are_not_streamed(http: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True} | asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"
    assert "whole answer only" in answer.json()["error"]["message"]


async def test_texts_become_tokens_and_come_back(http: httpx.AsyncClient) -> None:
    text = f"then {BOS}👧"
    told = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True, "model": MODEL})).json()
    assert told["tokens"] == list(TOKENIZER.encode(text))
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), MAX_MODEL_LEN)
    assert told["token_strs"][:3] == ["the", "n", " "]
    assert (await http.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": text}
    chat = (await http.post("/tokenize", json={"messages": HI, "add_special_tokens": None})).json()
    back = await http.post("/detokenize", json={"tokens": chat["tokens"]})
    assert back.json() == {"prompt": TOKENIZER.apply_chat_template(HI)}
    assert chat["token_strs"] is None
    for asked, end in (
        ({"add_generation_prompt": False}, PromptEnd.CLOSED),
        ({"continue_final_message": True, "add_generation_prompt": False}, PromptEnd.CONTINUED),
    ):
        other = (await http.post("/tokenize", json={"messages": HI} | asked)).json()
        assert TOKENIZER.decode(other["tokens"], False) == TOKENIZER.apply_chat_template(HI, end=end)


async def test_a_refusal_of_a_chat_to_be_counted_names_the_field_that_the_body_has(http: httpx.AsyncClient) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    answer = await http.post("/tokenize", json={"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text


async def test_of_a_prompt_that_is_cut_the_rest_is_echoed(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    cut: Any = {"truncate_prompt_tokens": 2}
    for prompt in ("in then", list(TOKENIZER.encode("in then"))):
        answer = await client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=0, extra_body=cut)
        assert answer.choices[0].text == " then"
    cut["truncate_prompt_tokens"] = 100
    answer = await client.completions.create(model=MODEL, prompt=f"{BOS}in", echo=True, max_tokens=0, extra_body=cut)
    assert answer.choices[0].text == f"{BOS}in", "nothing of it was cut"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/tokenize", {}, 400, "prompt", "one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": HI}, 400, "prompt", "one of prompt and messages"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least one message"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt", "lone surrogates"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt", "valid string"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, None, "not served here"),
        ("/detokenize", {}, 400, "tokens", "field required"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens.0", "valid integer"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens", "must be in [0, "),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "must be in [0, "),
    ],
)
async def test_tokens_that_cannot_be_told(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_every_parameter_arrives(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_completion_tokens=4,
        temperature=0.5,
        top_p=0.25,
        stop="END",
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "17": 2.5},
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "allowed_token_ids": [5, 3],
            "bad_words": ["ugly", "bad word"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "truncate_prompt_tokens": 9,
            "continue_final_message": True,
            "min_tokens": 2,
            "priority": -1,
            "cache_salt": "s",
            "user": "ignored",
            "not_a_field": 1,
        },
        extra_headers={"x-tenant": "t"},
    )
    (call,) = core.calls
    params = call.sampling_params
    assert call.messages is not None
    assert call.messages[0].content == "a\nb"
    assert (params.max_tokens, params.temperature, params.top_p, params.stop, params.seed) == (
        4,
        0.5,
        0.25,
        ("END",),
        7,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (params.top_k, params.min_p, params.ignore_eos, params.stop_token_ids) == (5, 0.125, True, (3, 4))
    assert (params.allowed_token_ids, params.bad_words) == ((5, 3), ("ugly", "bad word"))
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert (params.truncate_prompt_tokens, call.prompt_end) == (9, PromptEnd.CONTINUED)
    assert (params.min_tokens, params.logit_bias) == (2, ((5, -100.0), (17, 2.5)))
    assert (call.priority, call.tenant, call.cache_salt) == (-1, "t", "s")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"use_beam_search": True, "n": 3, "length_penalty": 0.5}, (3, 3, 0.5, False)),
        (CHAT, {"use_beam_search": True, "beam_width": 4, "early_stopping": True}, (4, 1, 1.0, True)),
        (CHAT, {"beam_width": 2, "temperature": 0}, (2, 1, 1.0, False)),
        (CHAT, {"use_beam_search": False, "n": 2}, (1, 2, 1.0, False)),
        (COMPLETION, {"use_beam_search": True, "best_of": 4, "n": 2}, (4, 2, 1.0, False)),
    ],
)
async def test_a_beam_search_is_asked_for_as_with_vllm_or_by_its_width(
    http: httpx.AsyncClient, core: FakeGateway, path: str, body: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "x"}
    assert (await http.post(path, json=prompt | body)).status_code == 200
    params = core.calls[-1].sampling_params
    assert (params.beam_width, params.n, params.length_penalty, params.early_stopping) == expected


async def test_defaults_are_openais(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    await client.chat.completions.create(model=MODEL, messages=HI)
    await client.completions.create(model=MODEL, prompt="x", user="u")
    assert [call.tenant for call in core.calls] == ["", "u"]
    chat, completion = (call.sampling_params for call in core.calls)
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)
    assert (chat.temperature, completion.temperature) == (1.0, 1.0)


CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
TOOL: Any = {"type": "function", "function": WEATHER.definition()["function"]}


CALLS = (
    '<think>Two.</think>Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>'
)


async def test_tool_calls(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text = CALLS
    answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL], n=2)
    for choice in answer.choices:
        message = choice.message
        assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert (message.reasoning_content, message.reasoning) == ("Two.", "Two.")
        assert message.tool_calls is not None
        functions = [call.function for call in message.tool_calls]
        assert [(f.name, json.loads(f.arguments)["city"]) for f in functions] == [
            (WEATHER.name, c) for c in ("Köln", "Ulm")
        ]
        assert len({call.id for call in message.tool_calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    num_reasoning = len(TOKENIZER.encode("<think>Two.</think>", add_special_tokens=False))
    assert abs(answer.usage.completion_tokens_details.reasoning_tokens / 2 - num_reasoning) <= len("<think>")
    use = core.calls[0].tools
    assert use is not None
    assert (use.tools, use.mode, use.parallel) == ((WEATHER,), "auto", True)


async def test_tool_calls_in_a_stream(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text = CALLS
    async with client.chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL]) as stream:
        events = [event async for event in stream]
    completion = await stream.get_final_completion()
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.tool_calls is not None
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Köln", "Ulm"]
    parts = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(parts) > 2 * len('{"city": "Ulm"}') - 4  # token by token


async def test_a_response(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    told = await client.responses.create(
        model=MODEL,
        input="hi",
        instructions="Be brief.",
        max_output_tokens=40,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
        metadata={"a": "b"},
        user="me",
        reasoning={"effort": "low"},
    )
    assert (told.output_text, told.status, told.model, told.metadata) == (core.text, "completed", MODEL, {"a": "b"})
    (item,) = told.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert item.content[0].logprobs is not None
    assert len(item.content[0].logprobs) == len(TOKENIZER.encode(core.text))
    assert told.usage is not None
    assert told.usage.output_tokens == len(TOKENIZER.encode(core.text))
    assert told.usage.input_tokens_details.cached_tokens == 2
    (call,) = core.calls
    assert told.id == f"resp_{call.request_id}"
    assert call.messages == (Message("system", "Be brief."), Message("user", "hi"))
    assert (call.tenant, call.sampling_params.max_tokens) == ("me", 40)
    assert call.template_options == {"reasoning_effort": "low"}
    cut = await client.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


RESPONSE_TOOL: Any = {"type": "function", "name": WEATHER.name, "parameters": WEATHER.parameters, "strict": False}


async def test_a_response_in_a_stream(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text = f"{CALLS} And so on."
    async with client.responses.stream(model=MODEL, input="hi", tools=[RESPONSE_TOOL]) as stream:
        events = [event async for event in stream]
        told = await stream.get_final_response()
    whole = await client.responses.create(model=MODEL, input="hi", tools=[RESPONSE_TOOL])
    for each in (told, whole):
        thought, said, *calls, last = each.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert thought.content[0].text == "Two."
        assert [item.content[0].text for item in (said, last)] == ["Let me see.", "\nAnd so on."]  # type: ignore[union-attr]
        assert [(c.name, json.loads(c.arguments)["city"]) for c in calls] == [  # type: ignore[union-attr]
            (WEATHER.name, "Köln"),
            (WEATHER.name, "Ulm"),
        ]
        assert all(item.status == "completed" for item in each.output)  # type: ignore[union-attr]
        assert len({item.id for item in each.output}) == 5  # type: ignore[union-attr]
        assert each.usage is not None
        assert 0 < each.usage.output_tokens_details.reasoning_tokens < 30
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 5
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me see.\nAnd so on."


async def test_a_response_goes_on_with_what_was_called(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text, core.max_model_len = CALLS, 1024
    first = await client.responses.create(model=MODEL, input="hi", tools=[RESPONSE_TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [{"type": "function_call_output", "call_id": c.call_id, "output": "rain"} for c in calls]
    history: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump() for item in first.output),
        *results,
    ]
    named: Any = {"type": "function", "name": WEATHER.name}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    await client.responses.create(
        model=MODEL, input=history, tools=[RESPONSE_TOOL], tool_choice=named, text=form, instructions="Rule."
    )
    call = core.calls[-1]
    assert call.messages is not None
    system, asked, said, *told = call.messages
    assert system == Message("system", "Rule.\n\nBe brief.")
    assert asked == Message("user", "hi")
    assert (said.content, said.reasoning) == ("Let me see.", "Two.")
    assert [made.call_id for made in said.tool_calls] == [c.call_id for c in calls]
    assert [(m.role, m.content, m.tool_call_id) for m in told] == [("tool", "rain", c.call_id) for c in calls]
    assert call.tools is not None
    assert (call.tools.named, call.tools.parallel) == (WEATHER.name, False)
    assert call.sampling_params.structured_output == StructuredOutput.json_schema({"type": "object"})


async def test_a_response_is_the_same_however_its_chunks_are_merged(
    client: openai.AsyncOpenAI, core: FakeGateway
) -> None:
    text = f'{CALLS} And so on.<tool_call>{{"name": "get_weather", "arguments": {{}}}}</tool_call>'
    seen = set()
    for num_merged in range(1, 90):
        core.text, core.num_merged = text, num_merged
        async with client.responses.stream(model=MODEL, input="hi", tools=[RESPONSE_TOOL]) as stream:
            told = await stream.get_final_response()
        parts = [item.model_dump() for item in told.output]
        seen.add(str([(p.get("arguments"), [c["text"] for c in p.get("content") or ()]) for p in parts]))
    assert len(seen) == 1
    assert "(None, ['\\nAnd so on.'])" in seen.pop()


async def test_a_response_that_is_cut_off_says_so(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text = CALLS
    for num_tokens, kind in ((12, "reasoning"), (30, "message"), (85, "function_call")):
        asked: Any = {"model": MODEL, "input": "hi", "tools": [RESPONSE_TOOL], "max_output_tokens": num_tokens}
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        told = events[-1].response
        assert (told.status, told.output[-1].status, told.output[-1].type) == ("incomplete", "incomplete", kind)


async def test_logprobs_of_a_response_are_those_of_its_text(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text = "<think>ab</think>\n\nYes é"
    asked: Any = {"model": MODEL, "input": "hi", "tools": [RESPONSE_TOOL], "include": ["message.output_text.logprobs"]}
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    expected = [TOKENIZER.token_bytes(i).decode(errors="replace") for i in TOKENIZER.encode("Yes é")]
    for told in (whole, events[-1].response):  # type: ignore[union-attr]
        part = told.output[-1].content[0]
        assert [bytes(entry.bytes).decode(errors="replace") for entry in part.logprobs] == expected
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == len(expected)


async def test_logprobs_that_come_with_the_end_of_reasoning_are_told(
    client: openai.AsyncOpenAI, core: FakeGateway
) -> None:
    core.text, core.num_merged = "<think>ab</think>\n\nYes é", 1000
    told = await client.responses.create(
        model=MODEL, input="hi", tools=[RESPONSE_TOOL], include=["message.output_text.logprobs"]
    )
    part = told.output[-1].content[0]  # type: ignore[union-attr]
    expected = [TOKENIZER.token_bytes(i).decode(errors="replace") for i in TOKENIZER.encode("Yes é")]
    found = [bytes(entry.bytes).decode(errors="replace") for entry in part.logprobs]
    assert found[-len(expected) :] == expected, "those of reasoning in the same chunk may come before them"


async def test_what_the_assistant_refused_is_part_of_its_turn(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    said: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    called: Any = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "x", "arguments": None}}],
    }
    await client.chat.completions.create(model=MODEL, messages=[*HI, said, called])
    turns = core.calls[-1].messages or ()
    assert turns[-2].content == "I cannot."
    assert [call.arguments for call in turns[-1].tool_calls] == ["{}"]


async def test_a_response_repeats_what_was_asked(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    told = await client.responses.create(
        model=MODEL, input="hi", tools=[RESPONSE_TOOL], parallel_tool_calls=False, text=form, tool_choice="auto"
    )
    assert told.parallel_tool_calls is False
    assert [tool.name for tool in told.tools] == [WEATHER.name]  # type: ignore[union-attr]
    assert told.text is not None
    assert told.text.format is not None
    assert told.text.format.model_dump(by_alias=True)["schema"] == {"type": "object"}
    assert core.calls[-1].tools is not None
    assert not core.calls[-1].tools.parallel


async def test_what_the_assistant_did_before_results_is_one_turn(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    def made(name: str, call_id: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}

    def thought(**fields: Any) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], **fields}

    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    core.max_model_len = 2048
    history: list[Any] = [
        {"role": "user", "content": "a"},
        thought(content=[{"type": "reasoning_text", "text": "one"}]),
        made("f", "1"),
        thought(summary=[{"type": "summary_text", "text": "two"}]),
        made("g", "2"),
        said("\nmore"),
        {"type": "function_call_output", "call_id": "1", "output": "r1"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "r2"}]},
        said("b"),
        said("c"),
        thought(content=[{"type": "reasoning_text", "text": "lost"}]),
        {"role": "user", "content": "d"},
    ]
    await client.responses.create(model=MODEL, input=history)
    messages = core.calls[-1].messages
    assert messages is not None
    calls = tuple(ToolCall(call_id, name, "{}") for name, call_id in (("f", "1"), ("g", "2")))
    assert messages == (
        Message("user", "a"),
        Message("assistant", "more", calls, reasoning="one\ntwo"),
        Message("tool", "r1", tool_call_id="1"),
        Message("tool", "r2", tool_call_id="2"),
        Message("assistant", "b"),
        Message("assistant", "c"),
        Message("user", "d"),
    )


async def test_what_a_response_repeats_is_checked(http: httpx.AsyncClient, core: FakeGateway) -> None:
    for fields in (
        '"metadata": {"a": "\\ud800"}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]',
    ):
        answer = await http.post(RESPONSES, content=f'{{"input": "hi", {fields}}}'.encode(), headers=JSON)
        assert answer.status_code == 400, answer.text
    assert core.calls == []


async def test_a_response_that_fails_says_so(http: httpx.AsyncClient, core: FakeGateway) -> None:
    core.error = Unavailable("gone")
    body = {"input": "hi", "stream": True}
    assert (await http.post(RESPONSES, json=body)).status_code == 503
    core.error_after = 2
    told = (await http.post(RESPONSES, json=body)).text
    last = json.loads(told.rstrip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "unavailable", "message": "gone"}
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", core.text[:2])


async def test_an_answer_without_calls_is_as_without_tools(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL], tool_choice="auto")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (core.text, "stop")
    assert choice.message.tool_calls is None


async def test_a_conversation_with_tools(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.text, core.max_model_len = CALLS, 1024
    first = await client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    said = first.choices[0].message
    assert said.tool_calls is not None
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "rain"}]}
        for call in said.tool_calls
    ]
    core.text = "Rain."
    named: Any = {"type": "function", "function": {"name": WEATHER.name}}
    messages: list[Any] = [{"role": "user", "content": ""}, said.model_dump(), *results]
    await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        tool_choice=named,
        parallel_tool_calls=False,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    call = core.calls[-1]
    assert call.messages is not None
    asked, *told = call.messages[1:]
    assert (asked.content, asked.reasoning) == ("Let me see.", "Two.")
    assert [(made.call_id, made.name) for made in asked.tool_calls] == [(c.id, WEATHER.name) for c in said.tool_calls]
    assert [(m.role, m.content, m.tool_call_id) for m in told] == [("tool", "rain", c.id) for c in said.tool_calls]
    assert call.tools is not None
    assert (call.tools.mode, call.tools.named, call.tools.parallel) == ("required", WEATHER.name, False)
    assert call.template_options == {"enable_thinking": False}


async def test_null_is_as_good_as_nothing(http: httpx.AsyncClient, core: FakeGateway) -> None:
    nulls = ("user", "model", "cache_salt", "priority", "stream", "n", "stop", "tool_choice", "tools", "logit_bias")
    body = {"messages": HI, "stream_options": {"include_usage": None}, **dict.fromkeys(nulls)}
    assert (await http.post(CHAT, json=body)).status_code == 200
    call = core.calls[-1]
    assert (call.tenant, call.model, call.cache_salt, call.priority) == ("", "", "", 0)


async def test_no_alternatives_need_no_log_probabilities(http: httpx.AsyncClient, core: FakeGateway) -> None:
    body = {"messages": HI, "logprobs": False, "top_logprobs": 0}
    assert (await http.post(CHAT, json=body)).status_code == 200
    assert core.calls[-1].sampling_params.logprobs is None


async def test_seeds_have_signs_and_top_p_may_be_nothing(http: httpx.AsyncClient, core: FakeGateway) -> None:
    for seed in (-2, -(2**63), 2**63 - 1):
        assert (await http.post(CHAT, json={"messages": HI, "seed": seed, "top_p": 0})).status_code == 200
    params = [call.sampling_params for call in core.calls]
    assert [each.seed for each in params] == [2**63 - 2, 0, 2**63 - 1]
    assert {each.top_p for each in params} == {1e-9}


async def test_minus_one_is_vllms_word_for_any_seed_and_all_tokens(http: httpx.AsyncClient, core: FakeGateway) -> None:
    assert (await http.post(CHAT, json={"messages": HI, "seed": -1, "top_k": -1})).status_code == 200
    params = core.calls[-1].sampling_params
    assert (params.seed, params.top_k) == (None, 0)


async def test_an_id_that_comes_again_gets_an_end_of_its_own(http: httpx.AsyncClient, core: FakeGateway) -> None:
    answers = [await http.post(CHAT, json={"messages": HI}, headers={"x-request-id": "mine"}) for _ in range(3)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [call.request_id for call in core.calls]
    assert ids[0] == "mine"
    assert all(again.startswith("mine~") for again in ids[1:])
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_is_taken_elsewhere_does_no_harm(
    http: httpx.AsyncClient, core: FakeGateway, stream: bool
) -> None:
    """Another gateway's call has it, or one that came in the same moment."""
    core.taken = {"mine", "batch-1"}
    answer = await http.post(CHAT, json={"messages": HI, "stream": stream}, headers={"x-request-id": "mine"})
    assert (answer.status_code, core.text in answer.text or stream) == (200, True)
    assert core.calls[-1].request_id.startswith("mine~")
    body = {"prompt": ["a", "b"], "stream": stream}
    answer = await http.post(COMPLETION, json=body, headers={"x-request-id": "batch"})
    assert answer.status_code == 200
    first, second = sorted(call.request_id for call in core.calls[-2:])
    assert first == "batch-0"
    assert second.startswith("batch-1~")


@pytest.mark.parametrize("placed", ["batch", "batch-1"])
async def test_an_id_one_of_whose_prompts_has_been_placed_gets_another_end(
    http: httpx.AsyncClient, core: FakeGateway, placed: str
) -> None:
    """As when its first prompt was refused for want of room, and its client tries again."""
    core.calls.append(GenerateCall(request_id=placed, sampling_params=SamplingParams()))
    answer = await http.post(COMPLETION, json={"prompt": ["a", "b"]}, headers={"x-request-id": "batch"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("batch~")
    assert sorted(call.request_id for call in core.calls[-2:]) == [
        f"{answer.headers['x-request-id']}-{number}" for number in range(2)
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (CHAT, {"messages": []}, 400, "messages", "at least one message"),
        (CHAT, {}, 400, "messages", "field required"),
        (CHAT, {"messages": "hi"}, 400, "messages", "got 'hi'; input should be a valid list"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "valid string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "text"),
        (CHAT, {"messages": [{"role": "x", "content": ""}]}, 400, "messages", "unknown role x"),
        (CHAT, {"messages": HI, "model": "other"}, 404, None, "'other' is not served here"),
        (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature", "got -1"),
        (CHAT, {"messages": HI, "temperature": "hot"}, 400, "temperature", "got 'hot'"),
        (CHAT, {"messages": HI, "top_p": 1.5}, 400, "top_p", "(0, 1]"),
        (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        (CHAT, {"messages": HI, "max_tokens": "7"}, 400, "max_tokens", "integer"),
        (CHAT, {"messages": HI, "temperature": 10**400}, 400, "temperature", "number"),
        (CHAT, {"messages": HI, "top_k": 2**70}, 400, "top_k", f"got {2**70}; must be an integer of at least 0 and at"),
        (CHAT, {"messages": HI, "seed": 2**70}, 400, "seed", f"at most {2**63 - 1}"),
        (CHAT, {"messages": HI, "stop_token_ids": [2**70]}, 400, "stop_token_ids", f"at most {2**32 - 1}"),
        (
            CHAT,
            {"messages": HI, "priority": 2**70},
            400,
            "priority",
            f"got {2**70}; input should be less than or equal",
        ),
        (CHAT, {"messages": HI, "priority": -(2**70)}, 400, "priority", f"equal to {1 - 2**31}"),
        (CHAT, {"messages": HI, "n": 0}, 400, "n", "at least 1"),
        (CHAT, {"messages": HI, "stop": 3}, 400, "stop", "valid string, or input should be a valid list"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
        (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools.0.type", "field required"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools.0.function", "field required"),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            400,
            "tools.0.function.name",
            "must match",
        ),
        (CHAT, {"messages": HI, "tools": [TOOL, TOOL]}, 400, "tools", "each name must be given once"),
        (
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "null"}}}],
            },
            400,
            "tools.0.function.parameters.type",
            "must be 'object'",
        ),
        (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "any"}, 400, "tool_choice", "'auto', 'none' or"),
        (
            CHAT,
            {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            400,
            "tool_choice",
            "must be one of the tools: get_weather",
        ),
        (CHAT, {"messages": HI, "functions": [{}]}, 400, "functions", "not supported"),
        (CHAT, {"messages": HI, "logit_bias": {"1" * 5000: 1.0}}, 400, "logit_bias", "must be token ids"),
        (CHAT, {"messages": HI, "logit_bias": MANY}, 400, "logit_bias", "has 1025 entries; must have at most 1024"),
        (CHAT, {"messages": HI, "chat_template_kwargs": MANY}, 400, "chat_template_kwargs", "must have at most 256"),
        (RESPONSES, {"input": "hi", "metadata": MANY}, 400, "metadata", "must have at most 16"),
        (RESPONSES, {"input": "x" * 500}, 400, "input", "below 128"),
        (CHAT, {"messages": HI, "user": "x" * 513}, 400, "user", "must have at most 512 characters"),
        (COMPLETION, {"prompt": "hi", "cache_salt": "x" * 513}, 400, "cache_salt", "must have at most 512 characters"),
        (CHAT, {"messages": HI, "include_reasoning": False}, 400, "include_reasoning", "only True"),
        (CHAT, {"messages": HI, "thinking_token_budget": 9}, 400, "thinking_token_budget", "not supported"),
        (CHAT, {"messages": HI, "verbosity": "low"}, 400, "verbosity", "only 'medium'"),
        (RESPONSES, {"input": "hi", "text": {"verbosity": "low"}}, 400, "text.verbosity", "only 'medium'"),
        (CHAT, {"messages": HI, "web_search_options": {}}, 400, "web_search_options", "not supported"),
        (CHAT, {"messages": HI, "return_tokens_as_token_ids": True}, 400, "return_tokens_as_token_ids", "not supp"),
        (COMPLETION, {"prompt": "hi", "logits_processors": ["x"]}, 400, "logits_processors", "not supported"),
        (COMPLETION, {"prompt": "hi", "prompt_embeds": "x"}, 400, "prompt_embeds", "not supported"),
        (RESPONSES, {"input": "hi", "return_token_ids": True}, 400, "return_token_ids", "not supported"),
        (RESPONSES, {"input": []}, 400, "input", "at least one item"),
        (RESPONSES, {"input": ""}, 400, "input", "at least one item"),
        (RESPONSES, {}, 400, "input", "field required"),
        (RESPONSES, {"input": "hi", "previous_response_id": "x"}, 400, "previous_response_id", "not supported"),
        (RESPONSES, {"input": "hi", "n": 2}, 400, "n", "only 1"),
        (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, 400, "tools.0.type", "should be 'function'"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, 400, "input.0.type", "only messages, function calls"),
        (RESPONSES, {"input": [{"content": "x"}]}, 400, "input.0.role", "must be set"),
        (RESPONSES, {"input": "hi", "metadata": {"a": 1.5}}, 400, "metadata.a", "valid string"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, 400, "input.0.call_id", "must be set"),
        (
            RESPONSES,
            {"input": "hi", "guided_regex": "a", "text": {"format": {"type": "json_object"}}},
            400,
            "text.format",
            "must be the only field",
        ),
        (RESPONSES, {"input": [{"role": "user"}]}, 400, "input.0.content", "must be a string"),
        (
            RESPONSES,
            {"input": 3},
            400,
            "input",
            "got 3; input should be a valid string, or input should be a valid list",
        ),
        (RESPONSES, {"input": ["x"]}, 400, "input.0", "got 'x'; input should be a valid dictionary"),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, 400, "input.0.content", "got 5; input should be"),
        (RESPONSES, {"input": [{"content": [{"type": 3}]}]}, 400, "input.0.content.0.type", "got 3; input should be"),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "function"}}, 400, "tool_choice.name", "field required"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "function"}}, 400, "tool_choice.function", "field required"),
        (CHAT, {"messages": HI, "stop": ["a", 3]}, 400, "stop.1", "got 3; input should be a valid string"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input.0.content",
            "only parts of text",
        ),
        (
            RESPONSES,
            {"input": "hi", "text": {"format": {"type": "json_schema"}}},
            400,
            "text.format.schema",
            "must be set",
        ),
        (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format.type", "'json_object' or"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            400,
            "response_format.json_schema",
            "must be set",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_object"}, "guided_regex": "a"},
            400,
            "response_format",
            "must be the only field",
        ),
        (
            CHAT,
            {"messages": HI, "structured_outputs": {"regex": "a", "grammar": "start: A"}},
            400,
            "structured_outputs",
            "one of json, json_object, regex, choice and grammar",
        ),
        (
            CHAT,
            {"messages": HI, "structured_outputs": {"structural_tag": "x"}},
            400,
            "structured_outputs.structural_tag",
            "not supported",
        ),
        (CHAT, {"messages": HI, "structured_outputs": {"jsno": {}}}, 400, "structured_outputs.jsno", "extra inputs"),
        (CHAT, {"messages": HI, "guided_whitespace_pattern": "x"}, 400, "guided_whitespace_pattern", "not supported"),
        (CHAT, {"messages": HI, "guided_choice": []}, 400, "guided_choice", "must be a list of texts"),
        (CHAT, {"messages": HI, "guided_regex": "a", "ignore_eos": True}, 400, "ignore_eos", "contradicts"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 500}]}, 400, "messages", "below 128"),
        (COMPLETION, {"prompt": "x" * 500}, 400, "prompt", "below 128"),
        (COMPLETION, {"prompt": "x", "seed": -(2**63) - 1}, 400, "seed", "at least 0"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3 * 64 * 1024}]}, 413, None, "at most"),
        (
            CHAT,
            {"messages": HI, "max_completion_tokens": 0},
            400,
            "max_completion_tokens",
            "greater than or equal to 1",
        ),
        (CHAT, {"messages": [*HI, CALLED]}, 400, "messages.1.tool_calls.0.function", "field required"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content", "must be a string"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice", "needs tools"),
        (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, 400, "modalities", "only ['text']"),
        (CHAT, {"messages": HI, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs", "valid dictionary"),
        (
            CHAT,
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
            "contradicts add_generation_prompt",
        ),
        (CHAT, {"messages": HI, "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "at least 1"),
        (CHAT, {"messages": HI, "truncate_prompt_tokens": 128}, 400, "truncate_prompt_tokens", "must be under 128"),
        (CHAT, {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens", "only False"),
        (COMPLETION, {"prompt": "x", "add_special_tokens": False}, 400, "add_special_tokens", "only True"),
        (CHAT, {"messages": HI, "guided_json": {}, "min_tokens": 5}, 400, "min_tokens", "contradicts structured"),
        (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "at most max_tokens, 8"),
        (CHAT, {"messages": HI, "logit_bias": {"a": 1}}, 400, "logit_bias", "its keys must be token ids"),
        (CHAT, {"messages": HI, "logit_bias": {"3": 200}}, 400, "logit_bias", "[-100, 100]"),
        (CHAT, {"messages": HI, "allowed_token_ids": []}, 400, "allowed_token_ids", "must not be empty"),
        (CHAT, {"messages": HI, "allowed_token_ids": [-1]}, 400, "allowed_token_ids", "at least 0"),
        (CHAT, {"messages": HI, "bad_words": [" "]}, 400, "bad_words", "not only whitespace"),
        (CHAT, {"messages": HI, "bad_words": ["a"] * 257}, 400, "bad_words", "must be at most 256"),
        (CHAT, {"messages": HI, "bad_words": ["a" * 99] * 42}, 400, "bad_words", "must have at most 4096 together"),
        (COMPLETION, {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs", "at least 0 and at most 20"),
        (COMPLETION, {"prompt": "x", "prompt_logprobs": 1, "beam_width": 2}, 400, "prompt_logprobs", "a beam search"),
        (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        (CHAT, {"messages": HI, "echo": True}, 400, "echo", "not supported"),
        (CHAT, {"messages": HI, "repetition_detection": {"min_count": 2}}, 400, "repetition_detection", "not supp"),
        (RESPONSES, {"input": "x", "moderation": {"model": "m"}}, 400, "moderation", "not supported"),
        (RESPONSES, {"input": "x", "previous_input_messages": HI}, 400, "previous_input_messages", "not supported"),
        (CHAT, {"messages": [{}] * 20_000}, 413, None, "body: must have at most 20000 objects and lists"),
        (CHAT, {"messages": [{"content": [{}] * 200}] * 100}, 413, None, "at most 20000 objects"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": [0, *[{}] * 20_000]}}}]}
                ]
            },
            413,
            None,
            "at most 20000 objects",
        ),
        (COMPLETION, {"prompt": [[]] * 20_000}, 413, None, "at most 20000 objects"),
        (CHAT, {"messages": HI, "tools": [0] * 129}, 400, "tools", "has 129 entries; must have at most 128"),
        (
            CHAT,
            {"messages": HI, "tool_choice": {"type": "function", "function": {"name": ""}}},
            400,
            "tool_choice.function.name",
            "at least 1 character",
        ),
        (COMPLETION, {"prompt": ""}, 400, "prompt", "at least one token"),
        (COMPLETION, {"prompt": []}, 400, "prompt", "empty"),
        (COMPLETION, {}, 400, "prompt", "must be a string"),
        (COMPLETION, {"prompt": ["a", 1]}, 400, "prompt", "must be a string"),
        (COMPLETION, {"prompt": ["a"] * 129}, 400, "prompt", "at most 128"),
        (COMPLETION, {"prompt": "x", "logprobs": 21}, 400, "logprobs", "at most 20"),
        (COMPLETION, {"prompt": "x", "best_of": 2}, 400, "best_of", "not supported"),
        (CHAT, {"messages": HI, "use_beam_search": True}, 400, "use_beam_search", "at least two beams"),
        (CHAT, {"messages": HI, "use_beam_search": False, "beam_width": 2}, 400, "use_beam_search", "contradicts"),
        (CHAT, {"messages": HI, "use_beam_search": True, "beam_width": 1}, 400, "beam_width", "contradicts"),
        (COMPLETION, {"prompt": "x", "use_beam_search": True, "best_of": 200}, 400, "best_of", "from 2 to 128"),
        (COMPLETION, {"prompt": "x", "use_beam_search": True, "best_of": 2, "n": 3}, 400, "best_of", "from 3 to"),
        (COMPLETION, {"prompt": "x", "beam_width": 4, "best_of": 7}, 400, "best_of", "not supported"),
        (CHAT, {"messages": HI, "beam_width": 2, "n": 3}, 400, "n", "at most the beam_width, 2"),
        (CHAT, {"messages": HI, "beam_width": 2, "stop": "a"}, 400, "stop", "not supported in a beam search"),
        (CHAT, {"messages": HI, "length_penalty": 2.0}, 400, "length_penalty", "needs beam search"),
        ("/v1/none", {}, 404, None, "Not Found"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_has_openais_error_body(
    http: httpx.AsyncClient,
    core: FakeGateway,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    words: str,
    stream: bool,
) -> None:
    answer = await http.post(path, json={**body, "stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert (error["code"] == "context_length_exceeded") == (words == "below 128")
    assert "\n" not in error["message"]
    assert answer.headers["x-request-id"]
    # The core counts the requests that it refuses; any other bad request is reported to it, once.
    assert core.num_unread == (path in (CHAT, COMPLETION, RESPONSES) and not core.num_refused)
    if core.num_unread:
        assert core.last_unread[0] == answer.headers["x-request-id"]
        assert core.last_unread[1].endswith(("InvalidArgument", "NotFound", "RequestValidationError", "HTTPException"))


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff\xfe{}",
        b"[" * 50_000,
        b"null",
        b'{"messages": [{"role": "\\ud800"}]}',
        b'{"messages": [], "cache_salt": "\\udfff"}',
    ],
)
async def test_a_body_that_is_no_json_is_a_bad_request(http: httpx.AsyncClient, core: FakeGateway, raw: bytes) -> None:
    answer = await http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text
    assert core.num_unread == 1


@pytest.mark.parametrize("prompt", [b'"\\ud800"', b'["a", "\\ud800"]'])
async def test_half_a_character_is_said_of_the_prompt(http: httpx.AsyncClient, prompt: bytes) -> None:
    body = b'{"prompt": %b}' % prompt
    answer = await http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "without lone surrogates" in answer.json()["error"]["message"]


async def test_broken_json_is_said_of_the_body(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, content=b'{"model": "m"}', headers={"content-type": "text/plain"})
    assert "content-type: application/json" in answer.json()["error"]["message"]
    answer = await http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert error["param"] == "body"
    assert error["message"] == "body: JSON decode error: Expecting property name enclosed in double quotes"


async def test_wrong_method_and_wrong_model(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    answer = await http.get(CHAT)
    assert (answer.json()["error"]["code"], answer.headers["allow"]) == ("http_405", "POST")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ResourceExhausted("no room", retry_after_s=1.5), 429, "rate_limit_exceeded"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (Unavailable("no replica"), 503, "unavailable"),
        (EngineDead("step failed"), 503, "unavailable"),
        (KeyError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_core_have_their_code(
    http: httpx.AsyncClient, core: FakeGateway, error: Exception, status: int, code: str, stream: bool
) -> None:
    core.error = error
    answer = await http.post(CHAT, json={"messages": HI, "stream": stream}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text
    assert answer.headers.get("retry-after") == ("2" if status == 429 else None)
    assert answer.headers["x-request-id"] == "mine"


async def test_an_error_amid_a_stream_is_its_last_event(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    core.error, core.error_after = Unavailable("lost"), 2
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    seen = [await anext(stream) for _ in range(3)]
    assert [event.choices[0].finish_reason for event in seen] == [None] * 3
    with pytest.raises(openai.APIError, match="lost"):
        await anext(stream)
    assert core.num_open == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_closes_the_cores_streams(
    url: str, core: FakeGateway, path: str, stream: bool
) -> None:
    core.gate.clear()
    body = {"messages": HI, "prompt": ["a", "b"], "stream": stream}
    num_streams = 1 if path == CHAT else 2
    for number in range(1, 11):
        async with httpx.AsyncClient(base_url=url) as http:
            request = asyncio.create_task(read_on(http, path, body))
            await until(lambda number=number: len(core.calls) == number * num_streams)
            request.cancel()
            await asyncio.wait([request])
        await until(lambda number=number: core.num_closed_early == number * num_streams)
    assert core.num_open == 0


async def read_on(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def test_models_and_health(client: openai.AsyncOpenAI, http: httpx.AsyncClient, core: FakeGateway) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, ADAPTER]
    adapter = (await http.get(f"/v1/models/{ADAPTER}")).json()
    assert (adapter["id"], adapter["parent"]) == (ADAPTER, MODEL)
    assert (await client.models.retrieve(MODEL)).created == 1700000000
    assert (await http.get("/healthz")).status_code == (await http.get("/health")).status_code == 200
    core.ready = False
    assert (await http.get("/healthz")).status_code == (await http.get("/health")).status_code == 503


async def test_metrics(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        'shoal_replica_blocks{replica_id="r0",state="running",tier="device"} 30.0',
        'shoal_replica_blocks{replica_id="r0",state="cached",tier="device"} 20.0',
        'shoal_replica_blocks{replica_id="r0",state="empty",tier="device"} 50.0',
        'shoal_gateway_feed_connected{gateway_id="g0",replica_id="r1"} 0.0',
        'shoal_replica_preemptions_total{replica_id="r0"} 4.0',
        'shoal_gateway_requests_total{gateway_id="g0",outcome="shed"} 2.0',
        'shoal_gateway_requests_total{gateway_id="g0",outcome="failed"} 0.0',
        'shoal_gateway_requests_active{gateway_id="g0"} 1.0',
        'shoal_gateway_time_to_first_token_seconds_bucket{gateway_id="g0",le="0.25"} 2.0',
        'shoal_gateway_time_to_first_token_seconds_count{gateway_id="g0"} 3.0',
    ):
        assert line in lines
    assert 'shoal_replica_steps_total{replica_id="r1"}' not in answer.text


async def test_the_callers_trace_goes_on_and_a_broken_one_is_ignored(
    http: httpx.AsyncClient, core: FakeGateway
) -> None:
    trace = TraceContext(
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736", span_id="00f067aa0ba902b7", sampled=True, state="v=1"
    )
    for headers in (dict(trace.headers()), {"traceparent": "nonsense"}):
        assert (await http.post(CHAT, json={"messages": HI}, headers=headers)).status_code == 200
    assert [call.trace for call in core.calls] == [trace, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_said_is_not_logged_when_its_request_fails(
    http: httpx.AsyncClient, core: FakeGateway, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    core.error = ValueError("cannot make sense of under the old oak")
    body = {"messages": [{"role": "user", "content": "under the old oak"}], "stream": stream}
    assert (await http.post(CHAT, json=body, headers={"x-request-id": "mine"})).status_code == 500
    (record,) = [r for r in caplog.records if getattr(r, "fields", {}).get("request_id") == "mine"]
    assert record.fields["error"] == "ValueError"
    assert "fake_gateway.py" in record.fields["stack"][-1]
    assert not [r for r in caplog.records if "under the old oak" in f"{r.getMessage()} {vars(r)}"]


async def test_streams_tell_their_usage_as_it_grows(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    whole = await client.completions.create(model=MODEL, prompt=["hi", "the sea"], n=2)
    assert whole.usage is not None
    asked: Any = {"model": MODEL, "prompt": ["hi", "the sea"], "n": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [c.usage async for c in await client.completions.create(**asked, stream_options=options)]
    assert all(
        usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told
    )
    num_output = [usage.completion_tokens for usage in told if usage is not None]
    assert num_output == sorted(num_output)
    assert (num_output[0], num_output[-2:]) == (1, [whole.usage.completion_tokens] * 2)
    assert told[-1] == whole.usage
    without = {"continuous_usage_stats": True}
    assert {c.usage async for c in await client.completions.create(**asked, stream_options=without)} == {None}


@pytest.mark.parametrize("num_merged", [1, 3])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_token_ids_are_told_where_asked_for(
    client: openai.AsyncOpenAI, core: FakeGateway, is_chat: bool, num_merged: int
) -> None:
    """Where vLLM has them: of a chat's prompt beside the choices, of a completion's in each."""
    core.num_merged = num_merged
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    asked: Any = {"messages": HI} if is_chat else {"prompt": "the sea"}
    asked |= {"model": MODEL, "extra_body": {"return_token_ids": True}}
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}]) if is_chat else "the sea"
    prompt, answer = list(TOKENIZER.encode(text)), list(TOKENIZER.encode(core.text))
    whole = await create(**asked)
    assert (whole if is_chat else whole.choices[0]).prompt_token_ids == prompt
    assert whole.choices[0].token_ids == answer
    chunks = [chunk async for chunk in await create(**asked, stream=True)]
    assert (chunks[0] if is_chat else chunks[0].choices[0]).prompt_token_ids == prompt
    ids = [getattr(choice, "token_ids", ()) for chunk in chunks for choice in chunk.choices]
    assert [token_id for piece in ids for token_id in piece] == answer
    plain = await create(**asked | {"extra_body": {}})
    assert not hasattr(plain.choices[0], "token_ids")


async def test_an_echo_alone_has_no_token_ids(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "the sea", "echo": True, "max_tokens": 0}
    asked["extra_body"] = {"return_token_ids": True}
    (choice,) = (await client.completions.create(**asked)).choices
    assert (choice.token_ids, choice.prompt_token_ids) == ([], list(TOKENIZER.encode("the sea")))
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    assert [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids] == []


async def test_how_much_to_reason_is_for_the_template(client: openai.AsyncOpenAI, core: FakeGateway) -> None:
    await client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="low")
    await client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="none")
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    await client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="none", extra_body=own)
    assert [call.template_options for call in core.calls] == [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        {"reasoning_effort": "none", "enable_thinking": True, "thinking": False},
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": HI}), (COMPLETION, {"prompt": "hi"}), (RESPONSES, {"input": "hi"})],
)
async def test_what_a_body_leaves_out_is_for_the_model_to_say(
    http: httpx.AsyncClient, core: FakeGateway, path: str, body: dict[str, Any]
) -> None:
    for given in ({}, {"temperature": None, "top_k": -1}, {"temperature": 0, "top_p": 0.5, "min_p": 0.1}):
        assert (await http.post(path, json=body | given)).status_code == 200
    assert [call.left_out for call in core.calls] == [DEFAULTED, DEFAULTED - {"top_k"}, {"top_k", "repetition_penalty"}]


async def test_a_bad_request_id_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/models", headers={"x-request-id": "a b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
