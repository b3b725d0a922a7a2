"""Turns chunks into OpenAI's answers: whole bodies and server-sent events, for chats and for completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal_cluster.serve.call import CHAT_ID, COMPLETION_ID, GatewayCore, GenerateCall, Usage
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


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

    def delta(self, index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None) -> Json:
        delta = {"content": text} if text or logprobs else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

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

    def delta(self, index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: FinishReason | None) -> Json:
        return self.delta(index, text, logprobs, finish_reason)

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
class _Choice:
    """One sequence, accumulated."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _UsageSum:
    """Usage summed over all calls of a request."""

    usages: list[Usage] = field(default_factory=list)

    def body(self) -> Json:
        num_prompt = sum(usage.num_prompt_tokens for usage in self.usages)
        num_output = sum(usage.num_output_tokens for usage in self.usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in self.usages)},
        }


async def whole_answer(
    core: GatewayCore, calls: Sequence[GenerateCall], shape: AnswerShape, request_id: str, model: str
) -> Json:
    """Run ``calls`` to their end and return one body. Choices are numbered prompt by prompt."""
    params = calls[0].sampling_params
    choices = [_Choice() for _ in range(params.n * len(calls))]
    usage = _UsageSum()
    async with open_merged_chunks(core, calls) as chunks:
        async for number, chunk in chunks:
            choice = choices[number * params.n + chunk.index]
            choice.text.append(chunk.text)
            choice.logprobs += chunk.logprobs
            choice.finish_reason = chunk.finish_reason or choice.finish_reason
            if chunk.usage is not None:
                usage.usages.append(chunk.usage)
    bodies = [
        shape.whole(
            index,
            "".join(choice.text),
            None if params.logprobs is None else shape.logprobs(choice.logprobs, 0)[0],
            choice.finish_reason,
        )
        for index, choice in enumerate(choices)
    ]
    return _head(shape.whole_object, shape, request_id, model) | {"choices": bodies, "usage": usage.body()}


async def answer_events(
    core: GatewayCore,
    calls: Sequence[GenerateCall],
    shape: AnswerShape,
    request_id: str,
    model: str,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Run ``calls``; yields server-sent events as chunks come. Closing the generator cancels the calls."""
    params = calls[0].sampling_params
    head = _head(shape.event_object, shape, request_id, model)
    if include_usage:
        head["usage"] = None
    offsets: dict[int, int] = {}
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
            if chunk.text or logprobs or chunk.finish_reason:
                events += event(head | {"choices": [shape.delta(index, chunk.text, logprobs, chunk.finish_reason)]})
            if events:
                yield events  # together: a write for each event costs more than all else here
            if chunk.usage is not None:
                usage.usages.append(chunk.usage)
    yield (event(head | {"choices": [], "usage": usage.body()}) if include_usage else b"") + DONE


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def _head(kind: str, shape: AnswerShape, request_id: str, model: str) -> Json:
    return {"id": shape.id_prefix + request_id, "object": kind, "created": int(time.time()), "model": model}
