"""Turns chunks into OpenAI's answers: whole bodies and server-sent events, for chats and for completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from shoal_cluster.serve.call import Chunk, GenerateCall, Usage
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import Json, event
from shoal_cluster.serve.http.openai_echo import Echo
from shoal_cluster.serve.http.openai_shapes import AnswerShape, Choice, CompletionShape, prompt_logprobs_body
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason
from shoal_replica.sampling_params import SamplingParams

DONE = b"data: [DONE]\n\n"
MAX_TOLD = 300_000  # log-probabilities of prompts in an answer: some 20 MB, and most of a second's work


def _cut(tokens: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """With so many of the likeliest tokens each."""
    return [replace(token, top=token.top[:num_top]) for token in tokens]


@dataclass(slots=True)
class _UsageSum:
    """Usage summed over all calls of a request. With ``is_all_prompt`` the answers count as empty."""

    is_all_prompt: bool = False
    usages: list[Usage] = field(default_factory=list)
    num_prompt: int = 0  # so far, as is
    num_output: int = 0

    def take(self, chunk: Chunk) -> None:
        if chunk.prompt is not None:
            self.num_prompt += len(chunk.prompt.token_ids)
        self.num_output += 0 if self.is_all_prompt else len(chunk.token_ids)
        if chunk.usage is not None:
            self.usages.append(chunk.usage)

    def so_far(self) -> Json:
        """In vLLM's form: as much as is known before the end."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
        }

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
        """Run ``calls`` to their end and return one body. Choices are numbered prompt by prompt.

        Raises:
            InvalidArgument: the prompts have more log-probabilities than one answer may hold.
        """
        params, num_told = calls[0].sampling_params, 0
        choices = [Choice() for _ in range(params.n * len(calls))]
        usage, prompts = _UsageSum(body.is_all_prompt), dict[int, tuple[int, ...]]()
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                choices[number * params.n + chunk.index].add(chunk)
                usage.take(chunk)
                if chunk.prompt is not None:
                    prompts[number] = chunk.prompt.token_ids
                num_told += len(chunk.prompt_logprobs) * (1 + (params.prompt_logprobs or 0)) * params.n
                if num_told > MAX_TOLD:
                    limit = f"their log-probabilities in all choices must be at most {MAX_TOLD}; ask for fewer at once"
                    raise InvalidArgument("prompt", f"{len(calls)} prompts", limit)
        echoes = [await Echo.of(core, call, body.is_all_prompt) for call in calls] if body.echoes else []
        whole = _head(self._shape.whole_object, self._shape, request_id, model)
        if params.prompt_logprobs is None:
            whole["choices"] = self._choices(choices, params, echoes)
        else:  # takes a while
            whole["choices"] = await asyncio.to_thread(self._choices, choices, params, echoes)
        if body.prompt_logprobs is not None:
            scored = [choice.prompt_logprobs for choice in choices[:: params.n]]  # siblings share a prompt
            await asyncio.to_thread(self._tell_prompts, whole, scored, params.n, body.prompt_logprobs)
        if body.return_token_ids:
            for index, (told, choice) in enumerate(zip(whole["choices"], choices, strict=True)):
                told["token_ids"] = [] if body.is_all_prompt else choice.token_ids
                self._tell_prompt(whole, told, prompts[index // params.n])
        return whole | {"usage": usage.body()}

    def _choices(self, choices: Sequence[Choice], params: SamplingParams, echoes: Sequence[Echo]) -> list[Json]:
        """The choices of a whole answer."""
        shape, bodies = self._shape, list[Json]()
        prompt: tuple[Json, int] | None = None
        for index, choice in enumerate(choices):
            logprobs = None
            if params.logprobs is not None:
                logprobs, _ = shape.logprobs(choice.logprobs, 0)
            if echoes:
                echo = echoes[index // params.n]
                answer = Choice() if echo.is_all else choice
                choice = replace(choice, text=[echo.text, *answer.text])
                if echo.is_all:
                    choice.finish_reason, choice.stop_reason = FinishReason.LENGTH, None
                if params.logprobs is not None and isinstance(shape, CompletionShape):
                    if index % params.n == 0:  # its siblings share it
                        prompt = shape.prompt_logprobs(echo, _cut(choice.prompt_logprobs, params.logprobs))
                    assert prompt is not None
                    own, _ = shape.logprobs(answer.logprobs, prompt[1])
                    logprobs = {name: [*prompt[0][name], *told] for name, told in own.items()}
            bodies.append(shape.whole(index, choice, logprobs))
        return bodies

    def _tell_prompts(self, whole: Json, scored: Sequence[Sequence[TokenLogprobs]], n: int, num_top: int) -> None:
        """Add the log-probabilities of the prompts, of which each has ``n`` choices, in vLLM's form."""
        told = [prompt_logprobs_body(self._shape, tokens, num_top) for tokens in scored]
        if not self._shape.tells_prompt_by_choice:
            whole["prompt_logprobs"] = told[0]
            return
        for index, choice in enumerate(whole["choices"]):
            choice["prompt_logprobs"] = told[index // n]

    def _tell_prompt(self, body: Json, choice: Json, token_ids: tuple[int, ...]) -> None:
        """Add the prompt's tokens where vLLM has them."""
        (choice if self._shape.tells_prompt_by_choice else body)["prompt_token_ids"] = token_ids

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
        echoes: dict[int, Echo] = {}
        usage, prompts = _UsageSum(body.is_all_prompt), dict[int, tuple[int, ...]]()
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                index = number * params.n + chunk.index
                is_new, events = index not in offsets, b""
                usage.take(chunk)
                if chunk.prompt is not None:
                    prompts[number] = chunk.prompt.token_ids
                if body.tells_usage_so_far:
                    head["usage"] = usage.so_far()
                if body.echoes:
                    if number not in echoes:
                        echoes[number] = await Echo.of(core, calls[number], body.is_all_prompt)
                    chunk = _after_prompt(chunk, echoes[number], is_first=is_new)
                if is_new:
                    offsets[index] = 0
                    if (opening := shape.opening(index)) is not None:
                        first = head | {"choices": [opening]}
                        if body.return_token_ids:
                            self._tell_prompt(first, opening, prompts[number])
                        events = event(first)
                logprobs = None
                if chunk.logprobs:
                    logprobs, offsets[index] = shape.logprobs(chunk.logprobs, offsets[index])
                if chunk.tool_calls:
                    have_called.add(index)
                has_news = chunk.text or logprobs or chunk.finish_reason or chunk.reasoning or chunk.tool_calls
                if has_news or body.return_token_ids:
                    delta = shape.delta(index, chunk, logprobs, index in have_called)
                    if body.return_token_ids:
                        delta["token_ids"] = chunk.token_ids
                        if is_new and shape.tells_prompt_by_choice:
                            delta["prompt_token_ids"] = prompts[number]
                    events += event(head | {"choices": [delta]})
                if events:
                    yield events  # together: a write for each event costs more than all else here
        yield (event(head | {"choices": [], "usage": usage.body()}) if include_usage else b"") + DONE


def _after_prompt(chunk: Chunk, echo: Echo, is_first: bool) -> Chunk:
    """A chunk of a stream that begins with its prompt."""
    if echo.is_all:
        reason = None if chunk.finish_reason is None else FinishReason.LENGTH
        chunk = replace(chunk, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)
    return replace(chunk, text=echo.text + chunk.text) if is_first else chunk


def _head(kind: str, shape: AnswerShape, request_id: str, model: str) -> Json:
    return {"id": shape.id_prefix + request_id, "object": kind, "created": int(time.time()), "model": model}
