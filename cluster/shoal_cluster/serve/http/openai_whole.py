"""An OpenAI answer of choices as one body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from shoal_cluster.serve.call import Chunk
from shoal_cluster.serve.http.encoding import Json
from shoal_cluster.serve.http.openai_echo import Echo
from shoal_cluster.serve.http.openai_shapes import AnswerShape, Choice, CompletionShape, prompt_logprobs_body
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_cluster.serve.http.openai_usage import UsageSum
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason
from shoal_replica.sampling_params import SamplingParams

MAX_TOLD = 300_000  # log-probabilities of prompts in an answer: some 20 MB, and most of a second's work


class WholeChoices:
    """The choices of one request, which are numbered prompt by prompt, as they come into being.

    Args:
        params: of each of its calls.
    """

    def __init__(self, shape: AnswerShape, body: RequestBody, params: SamplingParams, num_calls: int) -> None:
        self._shape = shape
        self._body = body
        self._params = params
        self._num_calls = num_calls
        self._choices = [Choice() for _ in range(params.n * num_calls)]
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._usage = UsageSum(body.is_all_prompt)
        self._num_told = 0

    def take(self, number: int, chunk: Chunk) -> None:
        """Add a chunk of a prompt's call.

        Raises:
            InvalidArgument: the prompts have more log-probabilities than one answer may hold.
        """
        n = self._params.n
        self._choices[number * n + chunk.index].add(chunk)
        self._usage.take(chunk)
        if chunk.prompt is not None:
            self._prompts[number] = chunk.prompt.token_ids
        self._num_told += len(chunk.prompt_logprobs) * (1 + (self._params.prompt_logprobs or 0)) * n
        if self._num_told > MAX_TOLD:
            limit = f"their log-probabilities in all choices must be at most {MAX_TOLD}; ask for fewer at once"
            raise InvalidArgument("prompt", f"{self._num_calls} prompts", limit)

    async def complete(self, head: Json, echoes: Sequence[Echo]) -> Json:
        """The body, which begins with ``head``; its texts with the ``echoes`` of the prompts, if there are any."""
        body, n, whole = self._body, self._params.n, head
        if self._params.prompt_logprobs is None:
            whole["choices"] = self._told(echoes)
        else:  # takes a while
            whole["choices"] = await asyncio.to_thread(self._told, echoes)
        if body.prompt_logprobs is not None:
            await asyncio.to_thread(self._tell_prompt_logprobs, whole, body.prompt_logprobs)
        if body.return_token_ids:
            for index, (told, choice) in enumerate(zip(whole["choices"], self._choices, strict=True)):
                told["token_ids"] = [] if body.is_all_prompt else choice.token_ids
                place = told if self._shape.tells_prompt_by_choice else whole
                place["prompt_token_ids"] = self._prompts[index // n]
        return whole | {"usage": self._usage.body()}

    def _told(self, echoes: Sequence[Echo]) -> list[Json]:
        shape, params, told = self._shape, self._params, list[Json]()
        prompt: tuple[Json, int] | None = None
        for index, choice in enumerate(self._choices):
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
                    logprobs = {name: [*prompt[0][name], *its] for name, its in own.items()}
            told.append(shape.whole(index, choice, logprobs))
        return told

    def _tell_prompt_logprobs(self, whole: Json, num_top: int) -> None:
        """Add the log-probabilities of the prompts, in vLLM's form. Siblings share a prompt."""
        n = self._params.n
        told = [prompt_logprobs_body(self._shape, choice.prompt_logprobs, num_top) for choice in self._choices[::n]]
        if not self._shape.tells_prompt_by_choice:
            whole["prompt_logprobs"] = told[0]
            return
        for index, choice in enumerate(whole["choices"]):
            choice["prompt_logprobs"] = told[index // n]


def _cut(tokens: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """With so many of the likeliest tokens each."""
    return [replace(token, top=token.top[:num_top]) for token in tokens]
