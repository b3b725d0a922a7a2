"""An OpenAI answer of choices as server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from shoal_cluster.serve.call import Chunk
from shoal_cluster.serve.http.encoding import Json, event
from shoal_cluster.serve.http.openai_echo import Echo
from shoal_cluster.serve.http.openai_shapes import AnswerShape
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_cluster.serve.http.openai_usage import UsageSum
from shoal_replica.request import FinishReason

DONE = b"data: [DONE]\n\n"


class ChoiceEvents:
    """The events of one request's choices, which are numbered prompt by prompt.

    Args:
        head: what all events begin with.
        n: choices of each prompt.
        echo: the prompt with that number, where the answer is to begin with it.
    """

    def __init__(
        self, shape: AnswerShape, body: RequestBody, head: Json, n: int, echo: Callable[[int], Awaitable[Echo]]
    ) -> None:
        self._shape = shape
        self._body = body
        self._head = head | ({"usage": None} if body.include_usage else {})
        self._n = n
        self._echo = echo
        self._echoes: dict[int, Echo] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._offsets: dict[int, int] = {}  # by choice that has begun: where its next token begins in its text
        self._have_called: set[int] = set()
        self._usage = UsageSum(body.is_all_prompt)

    async def take(self, number: int, chunk: Chunk) -> bytes:
        """The events that a chunk of a prompt's call brings, which may be none."""
        index = number * self._n + chunk.index
        is_new = index not in self._offsets
        self._usage.take(chunk)
        if chunk.prompt is not None:
            self._prompts[number] = chunk.prompt.token_ids
        if self._body.tells_usage_so_far:
            self._head["usage"] = self._usage.so_far()
        if self._body.echoes:
            if number not in self._echoes:
                self._echoes[number] = await self._echo(number)
            chunk = _after_prompt(chunk, self._echoes[number], is_first=is_new)
        opening = self._begin(index, number) if is_new else b""
        return opening + self._delta(index, number, chunk, is_new)  # together: each write costs more than all else here

    def end(self) -> bytes:
        """The last events."""
        if not self._body.include_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": self._usage.body()}) + DONE

    def _begin(self, index: int, number: int) -> bytes:
        self._offsets[index] = 0
        if (opening := self._shape.opening(index)) is None:
            return b""
        first = self._head | {"choices": [opening]}
        if self._body.return_token_ids:
            place = opening if self._shape.tells_prompt_by_choice else first
            place["prompt_token_ids"] = self._prompts[number]
        return event(first)

    def _delta(self, index: int, number: int, chunk: Chunk, is_new: bool) -> bytes:
        shape, tells_tokens, logprobs = self._shape, self._body.return_token_ids, None
        if chunk.logprobs:
            logprobs, self._offsets[index] = shape.logprobs(chunk.logprobs, self._offsets[index])
        if chunk.tool_calls:
            self._have_called.add(index)
        has_news = chunk.text or logprobs or chunk.finish_reason or chunk.reasoning or chunk.tool_calls
        if not (has_news or tells_tokens):
            return b""
        delta = shape.delta(index, chunk, logprobs, index in self._have_called)
        if tells_tokens:
            delta["token_ids"] = chunk.token_ids
            if is_new and shape.tells_prompt_by_choice:
                delta["prompt_token_ids"] = self._prompts[number]
        return event(self._head | {"choices": [delta]})


def _after_prompt(chunk: Chunk, echo: Echo, is_first: bool) -> Chunk:
    """A chunk of a stream that begins with its prompt."""
    if echo.is_all:
        reason = None if chunk.finish_reason is None else FinishReason.LENGTH
        chunk = replace(chunk, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)
    return replace(chunk, text=echo.text + chunk.text) if is_first else chunk
