"""Turns chunks into Anthropic's messages: a list of blocks, and the events that tell how they grow."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.serve.call import MESSAGE_ID, Chunk
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import Json, event
from shoal_cluster.serve.http.errors import logged_report
from shoal_cluster.serve.http.messages_types import MessagesRequest
from shoal_replica.request import FinishReason

INVALID_JSON = "INVALID_JSON"  # where Anthropic would have a client put arguments that are no object
# The kinds of blocks, and of what they grow by: the delta's type, and the field that block and delta have the text in.
GROWTH = {
    "text": ("text_delta", "text", "text"),
    "thinking": ("thinking_delta", "thinking", "thinking"),
    "tool_use": ("input_json_delta", "input", "partial_json"),
}


class GrowingMessage:
    """One message as it comes into being. ``take`` returns the events of a chunk; ``body`` is the whole so far."""

    def __init__(self, body: MessagesRequest, request_id: str, model: str, max_model_len: int) -> None:
        self._request_id = request_id
        self._max_tokens = body.max_tokens
        self._max_model_len = max_model_len
        self._num_tokens = 0  # of prompt and answer, once these are known
        self._head: Json = {"id": MESSAGE_ID + request_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[Json] = []
        self._text: list[str] = []  # of the last block, while it is open
        self._end: Json = {"stop_reason": None, "stop_sequence": None}
        self._usage: Json = {"input_tokens": 0, "output_tokens": 0}

    def body(self) -> Json:
        """The message."""
        return self._head | {"content": self._blocks} | self._end | {"usage": self._usage}

    def begin(self, first: Chunk) -> bytes:
        """The first event."""
        if (prompt := first.prompt) is not None:
            self._usage = _usage_body(len(prompt.token_ids), prompt.num_cached_tokens, 0)
        return _event("message_start", message=self.body())

    def take(self, chunk: Chunk) -> bytes:
        """The events that a chunk brings."""
        events = b""
        if chunk.reasoning:
            events += self._grow("thinking", chunk.reasoning)
        if chunk.text:
            events += self._grow("text", chunk.text)
        for piece in chunk.tool_calls:
            events += self._call(piece)
        if chunk.usage is not None:
            usage = chunk.usage
            self._usage = _usage_body(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens)
            self._num_tokens = chunk.usage.num_prompt_tokens + chunk.usage.num_output_tokens
        if chunk.finish_reason is not None:
            events += self._close()
            self._end = self._ended(chunk)
        return events

    def end(self) -> bytes:
        """The last events."""
        return _event("message_delta", delta=self._end, usage=self._usage) + _event("message_stop")

    def fail(self, error: Exception) -> bytes:
        """The event that ends a stream which has begun."""
        return event(logged_report(error, self._request_id).anthropic_body(self._request_id), "error")

    def _grow(self, kind: str, text: str) -> bytes:
        is_open = bool(self._text) and self._blocks[-1]["type"] == kind
        events = b"" if is_open else self._begin_block(kind, {"signature": ""} if kind == "thinking" else {})
        return events + self._add(text)

    def _call(self, piece: CallPiece) -> bytes:
        events = self._begin_block("tool_use", {"id": piece.call_id, "name": piece.name}) if piece.name else b""
        return events + (self._add(piece.arguments) if piece.arguments else b"")

    def _begin_block(self, kind: str, fields: Json) -> bytes:
        events = self._close()
        block = {"type": kind, GROWTH[kind][1]: {} if kind == "tool_use" else ""} | fields
        self._blocks.append(block)
        self._text = [""]
        return events + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add(self, text: str) -> bytes:
        self._text.append(text)
        kind, _, field = GROWTH[self._blocks[-1]["type"]]
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, field: text})

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._text:
            return b""
        block, text = self._blocks[-1], "".join(self._text)
        block[GROWTH[block["type"]][1]] = _object(text) if block["type"] == "tool_use" else text
        self._text = []
        index, events = len(self._blocks) - 1, b""
        if block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            events = _event("content_block_delta", index=index, delta=signature)
        return events + _event("content_block_stop", index=index)

    def _ended(self, chunk: Chunk) -> Json:
        if chunk.finish_reason is FinishReason.LENGTH:
            is_full = self._num_tokens >= self._max_model_len and self._usage["output_tokens"] < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if isinstance(chunk.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
        has_called = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if has_called else "end_turn", "stop_sequence": None}


def new_message(core: GatewayCore, body: MessagesRequest, request_id: str, model: str, tells: bool) -> GrowingMessage:
    """An answer to ``body`` that is empty yet, for ``GrowingAnswers``."""
    return GrowingMessage(body, request_id, model, core.model_card(body.model).max_model_len)


def _object(arguments: str) -> Json:
    """A call's arguments, where they are an object that can be told."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID_JSON: arguments}


def _usage_body(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Json:
    """Unlike OpenAI's, input tokens are those that were not found in the cache."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_read_input_tokens": num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)
