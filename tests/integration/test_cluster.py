"""The APIs of a real cluster, through the clients that people use."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import jsonschema
import openai
import pytest
from fixtures.live_cluster import LiveCluster, is_idle, num_connected, pid_of, until_cluster
from fixtures.tiny_adapters import make_adapter
from fixtures.tool_formats import WEATHER
from fixtures.waiting import until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import REQUIRED, ToolUse
from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import LLM, SamplingParams
from shoal_replica.build import adapter_names
from shoal_replica.checkpoint import ensure_checkpoint
from shoal_replica.errors import NotFound, ResourceExhausted, ShoalError, Unavailable
from shoal_replica.executor import TokenLogprobs
from shoal_replica.llm import RequestOutput
from shoal_replica.request import FinishReason
from shoal_replica.structured_output import StructuredOutput
from shoal_replica.testing import num_reused_tokens

pytestmark = pytest.mark.integration

MAX_TOKENS_AFTER_CANCEL = 20
WHOLE_AGAIN_S = 2.0

SYSTEM = Message("system", "You answer briefly. " * 12)


def call(
    text: str = "Why is the sea salty?", request_id: str | None = None, model: str = "", **params: object
) -> GenerateCall:
    return GenerateCall(
        request_id=request_id or uuid.uuid4().hex,
        model=model,
        messages=(SYSTEM, Message("user", text)),
        sampling_params=SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        timeout_s=120,
    )


async def collect(client: GatewayClient, request: GenerateCall) -> list[Chunk]:
    return [chunk async for chunk in client.generate(request)]


def tokens(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def text(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def num_generated(row: ClusterRow) -> int:
    return sum(replica.stats.num_generated_tokens for replica in row.replicas if replica.stats)


async def test_a_call_says_who_ran_it_and_what_was_cached(cluster: LiveCluster):
    async with GatewayClient(cluster.grpc_address) as client:
        first = await collect(client, call("What is a reef?", max_tokens=8))
        again = await collect(client, call("What is a reef?", max_tokens=8))
        row = await client.cluster()
    usage, usage_again = first[-1].usage, again[-1].usage
    assert usage is not None
    assert usage_again is not None
    assert tokens(first) == tokens(again)
    assert usage.num_output_tokens == len(tokens(first)) == 8
    assert first[-1].finish_reason is FinishReason.LENGTH
    assert usage_again.num_cached_tokens == num_reused_tokens(usage.num_prompt_tokens, 8, 16) > 0
    assert usage_again.replica_id == usage.replica_id
    assert usage.replica_id in {r.replica_id for r in row.replicas}
    assert len(row.replicas) == 2


@pytest.fixture(scope="module")
def offline(cluster: LiveCluster) -> Iterator[LLM]:
    """The engine alone."""
    with LLM(cluster.model, dtype="float32", num_threads=1, num_blocks=512, adapters=cluster.adapters) as llm:
        yield llm


def prompts_of(llm: LLM, requests: list[GenerateCall]) -> list[list[int]]:
    chats = [llm.tokenizer.apply_chat_template([m.turn() for m in request.messages or ()]) for request in requests]
    return [list(llm.tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]


def undisturbed(llm: LLM, requests: list[GenerateCall]) -> list[RequestOutput]:
    """What the offline engine generates for the same calls."""
    adapters = [request.model if request.model in adapter_names(llm.config) else "" for request in requests]
    return llm.generate(prompts_of(llm, requests), [request.sampling_params for request in requests], adapters)


def check_undisturbed(llm: LLM, requests: list[GenerateCall], streams: list[list[Chunk]]) -> None:
    """The same of long greedy answers, for a fraction of the time: the offline engine, given an answer but for its last
    token, finds each token of it the likeliest after those before.
    """
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    for request, prompt, stream in zip(requests, prompts_of(llm, requests), streams, strict=True):
        params, answer = request.sampling_params, tokens(stream)
        assert (params.temperature, params.ignore_eos, len(answer)) == (0.0, True, params.max_tokens)
        output = llm.generate(prompt + answer[:-1], scored)[0]
        likeliest = [entry.top[0][0] for entry in output.prompt_logprobs[len(prompt) - 1 :]]
        assert [*likeliest, *output.token_ids] == answer
        assert text(stream) == llm.tokenizer.decode(answer)


async def test_the_cluster_generates_what_the_offline_engine_does(cluster: LiveCluster, offline: LLM):
    requests = [call(question, max_tokens=12) for question in ("Name a fish.", "Name a bird.", "Name a tree.")]
    requests.append(call("Name a star.", temperature=0.9, seed=11))
    async with GatewayClient(cluster.grpc_address) as client:
        streams = await asyncio.gather(*(collect(client, request) for request in requests))
    for stream, output in zip(streams, undisturbed(offline, requests), strict=True):
        assert tokens(stream) == output.token_ids
        assert text(stream) == output.text


async def test_sampling_is_repeatable_by_seed_and_n_sequences_differ(cluster: LiveCluster):
    params = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    async with GatewayClient(cluster.grpc_address) as client:
        one = await collect(client, call(**params))
        two = await collect(client, call(**params))
    for index in range(3):
        assert tokens(one, index) == tokens(two, index)
        assert len(tokens(one, index)) == 6
    assert len({tuple(tokens(one, index)) for index in range(3)}) > 1
    logprobs = [entry for chunk in one for entry in chunk.logprobs]
    assert len(logprobs) == 18
    assert all(isinstance(e, TokenLogprobs) and len(e.top) == 2 and e.top[0][1] >= e.logprob for e in logprobs)


async def test_scores_of_prompts_are_those_of_the_offline_engine(cluster: LiveCluster, offline: LLM):
    """By both protocols; what is cached of the same prompts neither helps nor suffers."""
    requests = [call(question, max_tokens=4, prompt_logprobs=2) for question in ("Name a fish.", "Name a bird.")]
    async with GatewayClient(cluster.grpc_address) as client:
        await collect(client, call("Name a fish.", max_tokens=4))
        streams = await asyncio.gather(*(collect(client, request) for request in requests))
        for stream, output in zip(streams, undisturbed(offline, requests), strict=True):
            scored = [entry for chunk in stream for entry in chunk.prompt_logprobs]
            assert [entry.token_id for entry in scored] == list(output.prompt_token_ids[1:])
            for entry, expected in zip(scored, output.prompt_logprobs, strict=True):
                assert entry.logprob == pytest.approx(expected.logprob, abs=0.05)
                assert len(entry.top) == 2
            assert tokens(stream) == output.token_ids
            assert stream[-1].usage.num_cached_tokens == 0
        again = await collect(client, call("Name a fish.", max_tokens=4))
        assert again[-1].usage.num_cached_tokens > 0
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused") as http:
        asked = {"model": cluster.model, "prompt": "The capital of France is Paris", "echo": True, "logprobs": 1}
        echo = (await http.completions.create(**asked, max_tokens=0)).choices[0]
        assert echo.text == asked["prompt"]
        assert "".join(echo.logprobs.tokens) == asked["prompt"]
        assert echo.logprobs.token_logprobs[0] is None
        assert echo.logprobs.token_logprobs[-1] > -1.0
        assert max(echo.logprobs.top_logprobs[-1], key=echo.logprobs.top_logprobs[-1].get) == " Paris"
        wordless = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        plain, other = [
            (await http.chat.completions.create(model=cluster.model, **wordless, max_tokens=12, extra_body=extra))
            for extra in ({}, {"bad_words": ["Paris"]})
        ]
        assert "Paris" in plain.choices[0].message.content
        assert "Paris" not in other.choices[0].message.content


async def test_beams_are_those_of_the_offline_engine(cluster: LiveCluster, offline: LLM):
    """Several searches at once, by both protocols; nothing of them is left."""
    params = {"beam_width": 4, "n": 3, "max_tokens": 12, "length_penalty": 0.8}
    requests = [call(question, **params) for question in ("Name a fish.", "Name a bird.", "Name a tree.")]
    async with GatewayClient(cluster.grpc_address) as client:
        streams = await asyncio.gather(*(collect(client, request) for request in requests))
        expected = undisturbed(offline, requests)
        for stream, output in zip(streams, expected, strict=True):
            assert [tokens(stream, index) for index in range(3)] == [o.token_ids for o in output.outputs]
            assert [text(stream, index) for index in range(3)] == [o.text for o in output.outputs]
            assert len({text(stream, index) for index in range(3)}) == 3
        wide = call(beam_width=128, max_tokens=4)
        with pytest.raises(ShoalError, match=r"beam_width: got 128; must be at most \d+, the sequences that"):
            await collect(client, wide)
        await until_cluster(client, is_idle)
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused") as http:
        answer = await http.chat.completions.create(
            model=cluster.model,
            messages=[{"role": m.role, "content": m.content} for m in requests[0].messages or ()],
            max_tokens=12,
            temperature=0,
            n=3,
            extra_body={"beam_width": 4, "length_penalty": 0.8},
        )
    assert [choice.message.content for choice in answer.choices] == [o.text for o in expected[0].outputs]


async def test_adapters_answer_under_their_names_and_from_caches_of_their_own(cluster: LiveCluster, offline: LLM):
    """As the offline engine does, by both protocols and the command line, beside the model alone."""
    question = "Tell me in one sentence what a harbour is, and why ships would need one at all."
    names = ["", *cluster.adapters, cluster.model]
    requests = [replace(call(question, max_tokens=12), model=name) for name in names]
    requests.append(replace(requests[2], request_id=uuid.uuid4().hex, messages=(Message("user", question),)))
    async with GatewayClient(cluster.grpc_address) as client:
        streams = await asyncio.gather(*(collect(client, request) for request in requests))
        expected = undisturbed(offline, requests)
        assert [tokens(stream) for stream in streams] == [output.token_ids for output in expected]
        assert len({text(stream) for stream in streams[:-1]}) == 3
        again = [await collect(client, replace(r, request_id=uuid.uuid4().hex)) for r in requests[:3]]
        assert [tokens(stream) for stream in again] == [tokens(stream) for stream in streams[:3]]
        usages = [(first[-1].usage, second[-1].usage) for first, second in zip(streams, again, strict=False)]
        assert all(second.replica_id == first.replica_id for first, second in usages)
        assert all(second.num_cached_tokens >= 16 for _, second in usages)
        with pytest.raises(ShoalError, match=r"model: 'three' is not served here; .*, 'one', 'other/two' are"):
            await collect(client, replace(requests[0], model="three", request_id=uuid.uuid4().hex))
    base_url = f"http://{cluster.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as http:
        listed = {model.id: model.model_dump()["parent"] for model in (await http.models.list()).data}
        assert listed == {cluster.model: None, "one": cluster.model, "other/two": cluster.model}
        assert (await http.models.retrieve("other/two")).id == "other/two"
        messages = [{"role": m.role, "content": m.content} for m in requests[1].messages or ()]
        answer = await http.chat.completions.create(model="one", messages=messages, max_tokens=12, temperature=0)
    assert (answer.model, answer.choices[0].message.content) == ("one", expected[1].text)
    command = [sys.executable, "-m", "shoal_cluster.cli", "generate", question, "--model", "other/two"]
    command += ["--temperature", "0", "--max-tokens", "12", "--no-stats", "--address", cluster.grpc_address]
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == expected[-1].text.strip()


def deploy_with(cluster: LiveCluster, user_config: dict[str, Any]) -> None:
    """Give the running gateway another ``user_config``."""
    document = json.loads(json.dumps(cluster.document))
    document["applications"][0]["deployments"] = [{"name": "Gateway", "user_config": user_config}]
    deploy(document, cluster.dashboard_url, lambda progress: None)


async def test_adapters_come_and_go_while_replicas_run(cluster: LiveCluster, offline: LLM, tmp_path: Path):
    folder = make_adapter(tmp_path / "late", ensure_checkpoint(cluster.model), 7, strength=0.1)
    request = call("Name a fish.", model="late", max_tokens=12)
    offline.load_adapter("late", str(folder))
    expected = offline.generate(prompts_of(offline, [request]), request.sampling_params, "late")[0].token_ids
    offline.unload_adapter("late")
    async with GatewayClient(cluster.grpc_address) as client:
        with pytest.raises(NotFound, match="'late' is not served here"):
            await collect(client, request)
        before = {replica.replica_id for replica in (await client.cluster()).replicas}
        stream = asyncio.create_task(collect(client, call("Tell a long story.", max_tokens=300, ignore_eos=True)))
        await asyncio.to_thread(deploy_with, cluster, {"adapters": {"late": str(folder)}})
        async with asyncio.timeout(60):
            while True:
                try:
                    first = await collect(client, replace(request, request_id=uuid.uuid4().hex))
                    break
                except (NotFound, Unavailable):
                    await asyncio.sleep(0.2)
        many = [replace(request, request_id=uuid.uuid4().hex) for _ in range(6)]
        for answer in (first, *await asyncio.gather(*(collect(client, each) for each in many))):
            assert tokens(answer) == expected
        assert len(tokens(await stream)) == 300
        usage = (await stream)[-1].usage
        assert usage is not None
        assert usage.num_resumes == 0
        assert {replica.replica_id for replica in (await client.cluster()).replicas} == before
    http = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused", max_retries=0)
    assert "late" in [model.id for model in http.models.list()]
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://{cluster.http_address}/metrics")).text
    counted = {
        sample.labels.get("kind", ""): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name.startswith("shoal_gateway_model_") and sample.labels["model"] == "late"
    }
    assert counted[""] >= 7
    assert counted["output"] == counted[""] * len(expected)
    assert counted["prompt"] > counted["cached"]
    await asyncio.to_thread(deploy_with, cluster, {})
    await until(lambda: "late" not in [model.id for model in http.models.list()])


async def test_structured_answers_match_and_are_those_of_the_offline_engine(cluster: LiveCluster, offline: LLM):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    forms = [StructuredOutput.json_schema(schema), StructuredOutput("regex", "[a-z]{3,6}, [0-9]{2}"), None]
    requests = [call("Name a city.", max_tokens=60, temperature=0.8, seed=4, structured_output=f) for f in forms]
    async with GatewayClient(cluster.grpc_address) as client:
        streams = await asyncio.gather(*(collect(client, request) for request in requests))
        for stream, output in zip(streams, undisturbed(offline, requests), strict=True):
            assert tokens(stream) == output.token_ids
        assert re.fullmatch("[a-z]{3,6}, [0-9]{2}", text(streams[1]))
        wrong = call(structured_output=StructuredOutput("regex", "(a"))
        with pytest.raises(
            ShoalError, match=r"structured_output: got '\(a'; cannot be used as regex: .*unclosed group"
        ):
            await collect(client, wrong)
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused") as http:
        answer = await http.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Name a city."}],
            max_tokens=60,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        )
    city = json.loads(answer.choices[0].message.content or "")
    assert (city.keys(), answer.choices[0].finish_reason) == ({"city", "population"}, "stop")


async def test_tools_are_called_whole_and_as_a_stream(cluster: LiveCluster):
    tools: Any = [{"type": "function", "function": WEATHER.definition()["function"]}]
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {"model": cluster.model, "messages": messages, "tools": tools, "max_tokens": 120, "temperature": 0}
    named: Any = {"type": "function", "function": {"name": WEATHER.name}}
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused") as http:
        whole = await http.chat.completions.create(**asked, tool_choice=named)
        stream = await http.chat.completions.create(**asked, tool_choice=named, stream=True)
        events = [event async for event in stream]
        (choice,) = whole.choices
        (made,) = choice.message.tool_calls or ()
        assert (made.function.name, choice.finish_reason, choice.message.content) == (WEATHER.name, "tool_calls", None)
        jsonschema.validate(json.loads(made.function.arguments), dict(WEATHER.parameters))
        parts = [part for event in events for part in event.choices[0].delta.tool_calls or ()]
        assert "".join(part.function.arguments or "" for part in parts) == made.function.arguments
        assert [part.function.name for part in parts if part.id] == [WEATHER.name]
        assert events[-1].choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": made.id, "content": "It rains in Paris."}
        asked["messages"] = [*messages, choice.message.model_dump(exclude_none=True), result]
        told = await http.chat.completions.create(**asked, tool_choice="none")
        assert told.choices[0].message.content
        assert told.choices[0].message.tool_calls is None
        wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        asked["tools"] = [{"type": "function", "function": {"name": "odd", "parameters": wrong}}]
        with pytest.raises(openai.BadRequestError, match=r"tools: got 'odd'; .*uniqueItems"):
            await http.chat.completions.create(**asked, tool_choice="required")
    use = ToolUse((WEATHER,), REQUIRED, named=WEATHER.name, parallel=False)
    told_so = replace(call(max_tokens=120), messages=(Message("user", "What is the weather in Paris?"),), tools=use)
    async with GatewayClient(cluster.grpc_address) as client:
        chunks = await collect(client, told_so)
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert "".join(piece.arguments for piece in pieces) == made.function.arguments
    assert text(chunks) == ""


async def test_a_stop_string_ends_the_text_and_frees_the_blocks(cluster: LiveCluster):
    async with GatewayClient(cluster.grpc_address) as client:
        whole = text(await collect(client, call(max_tokens=24)))
        stop = whole[len(whole) // 2 :][:4]
        stopped = await collect(client, call(max_tokens=24, stop=(stop,)))
        assert text(stopped) == whole[: whole.index(stop)]
        assert stopped[-1].finish_reason is FinishReason.STOP
        await until_cluster(client, is_idle)


async def test_a_dozen_cancels_in_a_row_free_everything(cluster: LiveCluster):
    num_after: list[int] = []
    async with GatewayClient(cluster.grpc_address) as client:
        for number in range(12):
            stream = client.generate(call(f"Count to {number}.", max_tokens=2000, ignore_eos=True))
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 3:
                    break
            before = num_generated(await client.cluster())
            await stream.aclose()  # type: ignore[attr-defined]
            await until_cluster(client, is_idle)
            num_after.append(num_generated(await client.cluster()) - before)
        await until_cluster(client, is_idle)
    # The running step and those within the 50 ms that a cancel may take, longer where the gateway waits for a core.
    assert statistics.median(num_after) <= MAX_TOKENS_AFTER_CANCEL
    assert max(num_after) < 1000


async def test_explain_gives_the_recorded_decision_and_it_replays(cluster: LiveCluster):
    async with GatewayClient(cluster.grpc_address) as client:
        request = call("Explain yourself.", max_tokens=2)
        usage = (await collect(client, request))[-1].usage
        (record,) = (await client.explain(request.request_id)).records
        assert usage is not None
        assert record.decision.ranked[0] == usage.replica_id
        assert record.replay() == record.decision
        with pytest.raises(NotFound, match="nobody"):
            await client.explain("nobody")


async def test_health_and_reflection(cluster: LiveCluster):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service="shoal.v1.Generation"), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = [
            service.name async for r in stub.ServerReflectionInfo(asked) for service in r.list_services_response.service
        ]
        assert {"shoal.v1.Generation", "shoal.v1.Control"} <= set(listed)


BAD_CALLS = [
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"temperature": "warm"}, "temperature"),
    ({"n": 1000}, "n"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD_CALLS)
def test_bad_input_names_the_field_and_others_go_on(cluster: LiveCluster, wrong, field):
    url = f"http://{cluster.http_address}/v1/chat/completions"
    good = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    reply = httpx.post(url, json={**good, **wrong}, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert field in (error["param"] or error["message"])
    assert "Traceback" not in reply.text
    assert httpx.post(url, json=good, timeout=60).status_code == 200


def test_a_prompt_of_ten_megabytes_and_bytes_that_are_no_text_are_refused(cluster: LiveCluster):
    url = f"http://{cluster.http_address}/v1/completions"
    huge = httpx.post(url, json={"model": cluster.model, "prompt": "x" * 10_000_000}, timeout=60)
    assert huge.status_code in (400, 413)
    assert huge.json()["error"]["message"]
    nonsense = httpx.post(
        url, content=b'{"model": "\xff\xfe"}', headers={"content-type": "application/json"}, timeout=60
    )
    assert nonsense.status_code == 400
    assert nonsense.json()["error"]["type"] == "invalid_request_error"


async def test_a_long_prompt_is_refused_while_a_stream_goes_on(cluster: LiveCluster):
    """Tokenising seven megabytes takes seconds; no other stream may wait for that."""
    url = f"http://{cluster.http_address}/v1/completions"
    async with GatewayClient(cluster.grpc_address) as client, httpx.AsyncClient(timeout=60) as http:
        stream = client.generate(call("Tell a long story.", max_tokens=1500, ignore_eos=True))
        await anext(stream)
        posted = asyncio.create_task(http.post(url, json={"model": cluster.model, "prompt": "word " * 1_400_000}))
        num_meanwhile = 0
        async for chunk in stream:
            if posted.done():
                break
            num_meanwhile += len(chunk.token_ids)
        await stream.aclose()  # type: ignore[attr-defined]
        refused = await posted
        await until_cluster(client, is_idle)
    assert refused.status_code == 400
    assert "1400001 tokens" in refused.json()["error"]["message"]
    assert num_meanwhile >= 10  # they came while the text was being tokenised, not after


def test_the_openai_client(cluster: LiveCluster):
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused", max_retries=0)
    assert [model.id for model in client.models.list()] == [cluster.model, *cluster.adapters]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model=cluster.model, messages=messages, max_tokens=12, temperature=0, n=2, logprobs=True, top_logprobs=1
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert len(whole.choices) == 2
    assert whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)
    stream = client.chat.completions.create(
        model=cluster.model,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    assert all(chunk.usage.prompt_tokens == len(chunks[0].prompt_token_ids) for chunk in chunks)
    num_told = sum(len(getattr(choice, "token_ids", [])) for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage.completion_tokens == num_told
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError, match="leaves one to generate") as too_long:
        client.chat.completions.create(model=cluster.model, messages=[{"role": "user", "content": "sea " * 9000}])
    assert (too_long.value.param, too_long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=messages)
    completion = client.completions.create(model=cluster.model, prompt="1, 2, 3,", max_tokens=4, temperature=0)
    assert completion.choices[0].text.strip().startswith("4")


def test_the_anthropic_client(cluster: LiveCluster):
    """Its messages are the chats that OpenAI's client has, and its tools are called and answered."""
    base = f"http://{cluster.http_address}"
    client = anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0)
    greedy: Any = {"extra_body": {"temperature": 0}}
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.messages.create(model=cluster.model, max_tokens=12, system="Be brief.", messages=messages, **greedy)
    (said,) = whole.content
    with openai.OpenAI(base_url=f"{base}/v1", api_key="unused") as other:
        chat: Any = [{"role": "system", "content": "Be brief."}, *messages]
        told = other.chat.completions.create(model=cluster.model, messages=chat, max_tokens=12, temperature=0)
    ended = {"stop": "end_turn", "length": "max_tokens"}[told.choices[0].finish_reason]
    assert (said.text, whole.stop_reason) == (told.choices[0].message.content, ended)
    assert told.usage.prompt_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model=cluster.model, system="Be brief.", messages=messages)
    assert counted.input_tokens == told.usage.prompt_tokens

    stop = said.text[5:8]
    asked: Any = {"model": cluster.model, "max_tokens": 12, "system": "Be brief.", "messages": messages}
    with client.messages.stream(**asked, stop_sequences=[stop], **greedy) as stream:
        cut = stream.get_final_message()
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == (said.text[:5], "stop_sequence", stop)
    first_words = " ".join(said.text.split()[:2])
    begun = [*messages, {"role": "assistant", "content": first_words}]
    goes_on = client.messages.create(**asked | {"messages": begun}, **greedy)
    assert first_words + goes_on.content[0].text == said.text

    name, schema = WEATHER.name, dict(WEATHER.parameters)
    asked |= {"max_tokens": 120, "tools": [{"name": name, "input_schema": schema}]}
    asked["messages"] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.messages.stream(**asked, tool_choice={"type": "tool", "name": name}, **greedy) as stream:
        called = stream.get_final_message()
    (made,) = called.content
    assert (made.name, called.stop_reason) == (name, "tool_use")
    jsonschema.validate(made.input, schema)
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "It rains in Paris."}
    asked["messages"] = [*asked["messages"], called.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(**asked, tool_choice={"type": "none"}, **greedy)
    assert answer.content[0].text
    counted = client.messages.count_tokens(
        **{key: asked[key] for key in ("model", "system", "messages", "tools")}, tool_choice={"type": "auto"}
    )
    once = client.messages.create(**asked | {"max_tokens": 1}, **greedy)
    assert counted.input_tokens == once.usage.input_tokens + once.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="leaves one to generate"):
        client.messages.create(**asked | {"messages": [{"role": "user", "content": "sea " * 9000}]})


def test_the_command_line(cluster: LiveCluster):
    def shoal(*arguments: str) -> str:
        command = [sys.executable, "-m", "shoal_cluster.cli", *arguments, "--address", cluster.grpc_address]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert "Paris" in shoal("generate", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12")
    status = json.loads(shoal("status", "--json"))
    assert len(status["replicas"]) == 2


async def test_one_replica_computes_prompts_and_the_other_generates(cluster: LiveCluster, offline: LLM):
    """Roles begin and end while a stream runs. Answers are those of an undisturbed run, whatever was asked for."""
    tale = " ".join(f"In year {year} there were {year % 97} ships." for year in range(1, 40))
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "logprobs": 2},
        {"stop": ("the",)},
        {"structured_output": StructuredOutput("regex", "[a-z]{3,12} [0-9]{4}")},
        {"max_tokens": 1},
        {"beam_width": 2, "max_tokens": 8},
        {"prompt_logprobs": 0},
    ]
    requests = [call(f"{i}. {tale} Go on.", **{"max_tokens": 24, **fields}) for i, fields in enumerate(asked)]
    async with GatewayClient(cluster.grpc_address) as client:
        await until_cluster(client, is_idle)
        whole = asyncio.create_task(collect(client, call("Tell a long story.", max_tokens=300, ignore_eos=True)))
        await asyncio.to_thread(deploy_with, cluster, {"routing": {"prefill_share": 0.5}})
        row = await until_cluster(client, lambda row: {r.role for r in row.replicas} == {"prefill", "decode"})
        who = {r.role: r.replica_id for r in row.replicas}
        before = {r.role: r.stats for r in row.replicas if r.stats}
        # One after another: where prompts would have to wait for long, others help.
        streams = [await collect(client, request) for request in requests]
        usages = [stream[-1].usage for stream in streams]
        roles = [*["decode"] * 4, "prefill", "decode", "decode"]
        assert [usage.replica_id for usage in usages if usage] == [who[role] for role in roles]
        assert {usage.num_resumes for usage in usages if usage} == {0}
        explained = await client.explain(requests[0].request_id)
        assert [record.query.phase for record in explained.records] == ["prefill", "decode"]
        for record in explained.records:
            assert record.replay() == record.decision
        assert len(tokens(await whole)) == 300
        after = {r.role: r.stats for r in (await until_cluster(client, is_idle)).replicas if r.stats}
        taken = after["decode"].num_blocks_taken - before["decode"].num_blocks_taken
        assert taken == after["prefill"].num_blocks_given - before["prefill"].num_blocks_given
        assert taken > 4 * 20  # the prompts of four requests
        await asyncio.to_thread(deploy_with, cluster, {})
        await until_cluster(client, lambda row: {r.role for r in row.replicas} == {""})
        again = await collect(client, replace(requests[0], request_id=uuid.uuid4().hex))
    expected = await asyncio.to_thread(undisturbed, offline, requests)
    assert [tokens(stream) for stream in streams] == [output.token_ids for output in expected]
    assert tokens(again) == expected[0].token_ids
    assert [text(stream) for stream in streams] == [output.text for output in expected]


async def test_streams_of_a_replica_that_drains_go_on_elsewhere_with_their_blocks(cluster: LiveCluster, offline: LLM):
    """Each gets the tokens of an undisturbed run, and none is computed again from its beginning. All leave that are not
    near their end: on a busy machine one may be, while another has just begun.
    """
    params = {"max_tokens": 300, "ignore_eos": True}
    requests = [replace(call(seed=i, **params), messages=(Message("user", f"{i}: tell a tale."),)) for i in range(6)]
    async with GatewayClient(cluster.grpc_address) as client, httpx.AsyncClient() as http:
        await until_cluster(client, is_idle)
        streams: list[list[Chunk]] = [[] for _ in requests]

        async def run(number: int) -> None:
            async for chunk in client.generate(requests[number]):
                streams[number].append(chunk)

        tasks = [asyncio.create_task(run(i)) for i in range(6)]
        await until(lambda: all(len(tokens(stream)) >= 20 for stream in streams))
        rows = (await client.cluster()).replicas
        victim, survivor = sorted(rows, key=lambda r: r.stats.num_running if r.stats else 0, reverse=True)
        url = f"http://{cluster.http_address}/dashboard/controls/drain/{victim.replica_id}"
        answer = await http.post(url, headers={"authorization": f"Bearer {cluster.admin_key}"})
        assert answer.status_code == 200
        far = [number for number, stream in enumerate(streams) if len(tokens(stream)) < 200]
        assert len(far) > len(streams) // 2, "of the busier replica, too"
        await asyncio.gather(*tasks)
        usages = [stream[-1].usage for stream in streams]
        assert all(usages)
        assert {usage.replica_id for usage in (usages[number] for number in far) if usage} == {survivor.replica_id}
        assert {usage.num_resumes for usage in usages if usage} == {0}
        (stats,) = [r.stats for r in (await client.cluster()).replicas if r.replica_id == survivor.replica_id]
        assert victim.stats is not None
        assert stats is not None
        num_moved = victim.stats.num_running - (len(streams) - len(far))  # at least
        assert stats.num_blocks_taken >= 2 * num_moved  # the prompt's and some of the answer's, of each
        await asyncio.to_thread(check_undisturbed, offline, requests, streams)
        is_replaced = {victim.replica_id}.isdisjoint
        await until_cluster(
            client, lambda row: num_connected(row) == 2 and is_replaced(r.replica_id for r in row.replicas)
        )


async def test_streams_of_a_killed_replica_resume_and_the_others_never_notice(cluster: LiveCluster, offline: LLM):
    """Eight streams, about half of them on a replica that is killed: each gets the tokens of an undisturbed run. The
    new replica takes requests within ``WHOLE_AGAIN_S`` after Serve first reports it (its process takes longer than that
    to start), and the surviving replica still has its cache.
    """
    params = {"max_tokens": 300, "ignore_eos": True}
    # The prompts differ from the first block on, so that they spread over both replicas.
    requests = [replace(call(seed=i, **params), messages=(Message("user", f"{i}: tell a story."),)) for i in range(8)]
    async with GatewayClient(cluster.grpc_address) as client:
        rows = (await until_cluster(client, is_idle)).replicas
        pids = {r.replica_id: pid_of(cluster, "ReplicaServer", r.replica_id) for r in rows}
        streams: list[list[Chunk]] = [[] for _ in requests]
        started = asyncio.Event()

        async def run(number: int) -> None:
            async for chunk in client.generate(requests[number]):
                streams[number].append(chunk)
                if all(len(tokens(s)) >= 10 for s in streams):
                    started.set()

        tasks = [asyncio.create_task(run(i)) for i in range(8)]
        async with asyncio.timeout(60):
            await started.wait()
        row = await client.cluster()
        victim = max(row.replicas, key=lambda r: r.stats.num_running if r.stats else 0)
        os.kill(pids[victim.replica_id], signal.SIGKILL)
        comes = asyncio.create_task(time_to_connect(client, set(pids)))
        await asyncio.gather(*tasks)
        usages = [stream[-1].usage for stream in streams]
        assert {usage.num_resumes for usage in usages if usage} == {0, 1}
        await asyncio.to_thread(check_undisturbed, offline, requests, streams)
        assert await comes <= WHOLE_AGAIN_S
        await until_cluster(client, is_idle)
        kept, before = next(
            (i, usage)
            for i, usage in enumerate(usages)
            if usage and not usage.num_resumes and usage.replica_id != victim.replica_id
        )
        after = (await collect(client, replace(requests[kept], request_id=uuid.uuid4().hex)))[-1].usage
        assert after is not None
        num_reused = num_reused_tokens(before.num_prompt_tokens, before.num_output_tokens, 16)
        assert num_reused > 16, "the first block is every prompt's"
        assert (after.replica_id, after.num_cached_tokens) == (before.replica_id, num_reused)


async def time_to_connect(client: GatewayClient, known: set[str]) -> float:
    """Seconds from the first report of a replica that is not ``known`` until two replicas take requests."""
    await until_cluster(client, lambda row: any(replica.replica_id not in known for replica in row.replicas))
    seen_s = time.monotonic()
    await until_cluster(client, lambda row: num_connected(row) == 2)
    return time.monotonic() - seen_s


def test_no_errors_leak_tracebacks(cluster: LiveCluster):
    async def refused() -> ShoalError:
        async with GatewayClient(cluster.grpc_address) as client:
            wrong = GenerateCall(
                request_id="bad", token_ids=(1, 2, 10**6), sampling_params=SamplingParams(max_tokens=1), timeout_s=30
            )
            with pytest.raises(ShoalError) as caught:
                await collect(client, wrong)
            return caught.value

    error = asyncio.run(refused())
    assert not isinstance(error, ResourceExhausted)
    assert "prompt" in str(error)
    assert "Traceback" not in str(error)
