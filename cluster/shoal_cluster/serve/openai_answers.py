"""Turns chunks into OpenAI's answers: whole bodies and server-sent events, for chats and for completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from shoal_cluster.serve.call import Chunk, GatewayCore, GenerateCall, Usage
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_cluster.serve.openai_echo import Echo
from shoal_cluster.serve.openai_shapes import AnswerShape, Choice, CompletionShape, Json, prompt_logprobs_body
from shoal_cluster.serve.openai_types import RequestBody
from shoal_replica.executor import TokenLogprobs

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def _cut(tokens: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """With so many of the likeliest tokens each."""
    return [replace(token, top=token.top[:num_top]) for token in tokens]


@dataclass(slots=True)
class _UsageSum:
    """Usage summed over all calls of a request. With ``is_all_prompt`` the answers count as empty."""

    is_all_prompt: bool = False
    usages: list[Usage] = field(default_factory=list)

    def body(self) -> Json:
        num_prompt = sum(usage.num_prompt_tokens for usage in self.usages)
        num_output = 0 if self.is_all_prompt else sum(usage.num_output_tokens for usage in self.usages)
        num_reasoning = sum(usage.num_reasoning_tokens for usage in self.usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in self.usages)},
        }


class ChoiceAnswers:
    """Answers chats, or completions, by choices."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape

    async def whole(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: RequestBody, request_id: str, model: str
    ) -> Json:
        """Run ``calls`` to their end and return one body. Choices are numbered prompt by prompt."""
        shape, params = self._shape, calls[0].sampling_params
        choices = [Choice() for _ in range(params.n * len(calls))]
        echoes = await _echoes(core, calls, body)
        usage = _UsageSum(body.max_tokens == 0)
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                choices[number * params.n + chunk.index].add(chunk)
                if chunk.usage is not None:
                    usage.usages.append(chunk.usage)
        bodies = []
        for index, choice in enumerate(choices):
            choice.prompt_logprobs = choices[index - index % params.n].prompt_logprobs  # siblings share a prompt
            bodies.append(self._choice(index, choice, params.logprobs, echoes[index // params.n] if echoes else None))
        whole = _head(shape.whole_object, shape, request_id, model) | {"choices": bodies, "usage": usage.body()}
        if body.prompt_logprobs is not None:
            for place, choice in zip(bodies if shape.tells_prompt_by_choice else [whole], choices, strict=False):
                place["prompt_logprobs"] = prompt_logprobs_body(shape, choice.prompt_logprobs, body.prompt_logprobs)
        return whole

    def _choice(self, index: int, choice: Choice, num_top: int | None, echo: Echo | None) -> Json:
        """One choice of a whole answer."""
        shape, logprobs = self._shape, None
        if echo is not None:
            choice = replace(choice, text=[echo.text] if echo.is_all else [echo.text, *choice.text])
        if num_top is not None and echo is not None and isinstance(shape, CompletionShape):
            answer = [] if echo.is_all else choice.logprobs
            logprobs = shape.echoed(echo, _cut(choice.prompt_logprobs, num_top), answer)
        elif num_top is not None:
            logprobs, _ = shape.logprobs(choice.logprobs, 0)
        return shape.whole(index, choice, logprobs)

    async def events(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: RequestBody, request_id: str, model: str
    ) -> AsyncGenerator[bytes, None]:
        """Run ``calls``; yields server-sent events as chunks come. Closing the generator cancels the calls."""
        shape, params, include_usage = self._shape, calls[0].sampling_params, body.include_usage
        head = _head(shape.event_object, shape, request_id, model)
        if include_usage:
            head["usage"] = None
        offsets: dict[int, int] = {}
        have_called: set[int] = set()
        echoes = await _echoes(core, calls, body)
        usage = _UsageSum(body.max_tokens == 0)
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                index = number * params.n + chunk.index
                events = b""
                if echoes:
                    chunk = _after_prompt(chunk, echoes[number], is_first=index not in offsets)
                if index not in offsets:
                    offsets[index] = 0
                    opening = shape.opening(index)
                    if opening is not None:
                        events = event(head | {"choices": [opening]})
                logprobs = None
                if chunk.logprobs:
                    logprobs, offsets[index] = shape.logprobs(chunk.logprobs, offsets[index])
                if chunk.tool_calls:
                    have_called.add(index)
                if chunk.text or logprobs or chunk.finish_reason or chunk.reasoning or chunk.tool_calls:
                    events += event(head | {"choices": [shape.delta(index, chunk, logprobs, index in have_called)]})
                if events:
                    yield events  # together: a write for each event costs more than all else here
                if chunk.usage is not None:
                    usage.usages.append(chunk.usage)
        yield (event(head | {"choices": [], "usage": usage.body()}) if include_usage else b"") + DONE


async def _echoes(core: GatewayCore, calls: Sequence[GenerateCall], body: RequestBody) -> list[Echo]:
    """What the answer to each call begins with; nothing if answers do not tell their prompts."""
    return [await Echo.of(core, call, body.max_tokens == 0) for call in calls] if body.echoes else []


def _after_prompt(chunk: Chunk, echo: Echo, is_first: bool) -> Chunk:
    """A chunk of a stream that begins with its prompt."""
    if echo.is_all:
        chunk = replace(chunk, text="", logprobs=())
    return replace(chunk, text=echo.text + chunk.text) if is_first else chunk


def encode(body: Json) -> bytes:
    """As JSON."""
    return _encoder.encode(body)


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _head(kind: str, shape: AnswerShape, request_id: str, model: str) -> Json:
    return {"id": shape.id_prefix + request_id, "object": kind, "created": int(time.time()), "model": model}
