"""Turns chunks into OpenAI's answers: whole bodies and server-sent events, for chats and for completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal_cluster.chat.answer_reader import CallPiece
from shoal_cluster.serve.call import CHAT_ID, COMPLETION_ID, Chunk, GatewayCore, GenerateCall, Usage
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_cluster.serve.openai_types import RequestBody
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason

Json = dict[str, Any]
TOOL_CALLS = "tool_calls"  # OpenAI's finish reason
TokenBytes = Callable[[int], bytes]

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


@dataclass(slots=True)
class Choice:
    """One sequence, accumulated. Of each of its calls: the id, the name, and the parts of its arguments."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        for piece in chunk.tool_calls:
            if piece.name:
                self.calls.append((piece.call_id, piece.name, []))
            self.calls[piece.index][2].append(piece.arguments)
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How `/v1/chat/completions` encodes a choice. ``opening`` is its first event, before any text.

    ``logprobs`` encodes the log-probabilities of tokens, the first of which begins at ``offset`` in the choice's text,
    and returns them with the offset after the last.
    """

    token_bytes: TokenBytes
    id_prefix: str = CHAT_ID
    whole_object: str = "chat.completion"
    event_object: str = "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: Chunk, logprobs: Json | None, has_called: bool) -> Json:
        delta: Json = {"content": chunk.text} if chunk.text or logprobs else {}
        if chunk.reasoning:
            delta |= _reasoning(chunk.reasoning)
        if chunk.tool_calls:
            delta["tool_calls"] = [_call_delta(piece) for piece in chunk.tool_calls]
        reason = _finish_reason(chunk.finish_reason, has_called)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, index: int, choice: Choice, logprobs: Json | None) -> Json:
        text, reasoning = "".join(choice.text), "".join(choice.reasoning)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call_body(call_id, name, parts) for call_id, name, parts in choice.calls]
        reason = _finish_reason(choice.finish_reason, bool(choice.calls))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> tuple[Json, int]:
        content = []
        for token in tokens:
            entry = self._entry(token.token_id, token.logprob)
            content.append(entry | {"top_logprobs": [self._entry(*top) for top in token.top]})
        return {"content": content, "refusal": None}, offset

    def _entry(self, token_id: int, logprob: float) -> Json:
        spelled = self.token_bytes(token_id)
        return {"token": token_text(spelled), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelled)}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """How `/v1/completions` encodes a choice; see ChatShape."""

    token_bytes: TokenBytes
    id_prefix: str = COMPLETION_ID
    whole_object: str = "text_completion"
    event_object: str = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, chunk: Chunk, logprobs: Json | None, has_called: bool) -> Json:
        return {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}

    def whole(self, index: int, choice: Choice, logprobs: Json | None) -> Json:
        text = "".join(choice.text)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> tuple[Json, int]:
        texts, offsets, tops = [], [], []
        for token in tokens:
            spelled = self.token_bytes(token.token_id)
            texts.append(token_text(spelled))
            offsets.append(max(0, offset - bool(_inside_characters(spelled[:1]))))
            offset += len(spelled) - _inside_characters(spelled)
            known = (*token.top, (token.token_id, token.logprob))  # the sampled token is always among them
            tops.append({token_text(self.token_bytes(top)): max(logprob, LEAST_LOGPROB) for top, logprob in known})
        body = {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return body, offset


AnswerShape = ChatShape | CompletionShape


def _inside_characters(spelled: bytes) -> int:
    """Number of UTF-8 continuation bytes."""
    return sum(byte & 0xC0 == 0x80 for byte in spelled)


def token_text(spelled: bytes) -> str:
    """A token as text. One that is only part of a character is shown as its bytes, as OpenAI does."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


@dataclass(slots=True)
class _UsageSum:
    """Usage summed over all calls of a request."""

    usages: list[Usage] = field(default_factory=list)

    def body(self) -> Json:
        num_prompt = sum(usage.num_prompt_tokens for usage in self.usages)
        num_output = sum(usage.num_output_tokens for usage in self.usages)
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
        usage = _UsageSum()
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                choices[number * params.n + chunk.index].add(chunk)
                if chunk.usage is not None:
                    usage.usages.append(chunk.usage)
        bodies = [
            shape.whole(index, choice, None if params.logprobs is None else shape.logprobs(choice.logprobs, 0)[0])
            for index, choice in enumerate(choices)
        ]
        return _head(shape.whole_object, shape, request_id, model) | {"choices": bodies, "usage": usage.body()}

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
        usage = _UsageSum()
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                index = number * params.n + chunk.index
                events = b""
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


def encode(body: Json) -> bytes:
    """As JSON."""
    return _encoder.encode(body)


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _reasoning(text: str) -> Json:
    """Under both names that clients look for: DeepSeek's, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(piece: CallPiece) -> Json:
    function = {"name": piece.name, "arguments": piece.arguments} if piece.name else {"arguments": piece.arguments}
    first = {"id": piece.call_id, "type": "function"} if piece.name else {}
    return {"index": piece.index, **first, "function": function}


def _call_body(call_id: str, name: str, arguments: Sequence[str]) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}


def _finish_reason(reason: FinishReason | None, has_called: bool) -> str | None:
    return TOOL_CALLS if has_called and reason is FinishReason.STOP else reason


def _head(kind: str, shape: AnswerShape, request_id: str, model: str) -> Json:
    return {"id": shape.id_prefix + request_id, "object": kind, "created": int(time.time()), "model": model}
