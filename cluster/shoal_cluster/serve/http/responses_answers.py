"""Turns chunks into OpenAI's responses: an object of items, and the events that tell how they grow."""

from __future__ import annotations

import time
from typing import Any

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.serve.call import MESSAGE_ID, RESPONSE_ID, Chunk, Usage
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import Json, event
from shoal_cluster.serve.http.errors import logged_report
from shoal_cluster.serve.http.openai_shapes import ChatShape
from shoal_cluster.serve.http.responses_types import NamedFunction, ResponsesRequest
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason

REASONING_ID, CALL_ID = "rs_", "fc_"


class GrowingResponse:
    """One response as it comes into being. ``take`` returns the events of a chunk; ``body`` is the whole so far."""

    def __init__(
        self, body: ResponsesRequest, request_id: str, model: str, shape: ChatShape, *, tells: bool = True
    ) -> None:
        self._tells = tells  # whether anybody reads the events
        self._request_id = request_id
        self._shape = shape
        self._head = _head(body, request_id, model)
        self._items: list[Json] = []
        self._open: Json | None = None  # the last item, while it grows
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Json] = []
        self._held_logprobs: list[TokenLogprobs] = []  # of tokens that have no text yet
        self._num_events = 0
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._error: Json | None = None

    def body(self) -> Json:
        """The response object."""
        return self._head | {
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self._items,
            "usage": None if self._usage is None else _usage_body(self._usage),
        }

    def begin(self, first: Chunk) -> bytes:
        return self._event("response.created", response=self.body()) + self._event(
            "response.in_progress", response=self.body()
        )

    def take(self, chunk: Chunk) -> bytes:
        """The events that a chunk brings."""
        if chunk.text and self._items and self._items[-1]["type"] != "message":
            self._held_logprobs = []  # of what came between
        self._held_logprobs += chunk.logprobs
        events = b""
        if chunk.reasoning:
            events += self._grow("reasoning", chunk.reasoning)
            self._held_logprobs = list(chunk.logprobs) if chunk.text else []  # which tokens are whose is not known
        if chunk.text:
            events += self._grow("message", chunk.text)
        for piece in chunk.tool_calls:
            events += self._call(piece)
        self._usage = chunk.usage or self._usage
        if chunk.finish_reason is not None:
            is_cut = chunk.finish_reason is FinishReason.LENGTH
            self._status = "incomplete" if is_cut else "completed"
            events += self._close("incomplete" if is_cut else "completed")
        return events

    def end(self) -> bytes:
        return self._event(f"response.{self._status}", response=self.body())

    def fail(self, error: Exception) -> bytes:
        """The event that ends a stream which has begun."""
        told = logged_report(error, self._request_id)
        events = self._close("incomplete")
        self._status = "failed"
        self._error = {"code": told.kind.openai_code, "message": told.message}
        return events + self._event("response.failed", response=self.body())

    def _grow(self, kind: str, text: str) -> bytes:
        events = b"" if self._open is not None and self._open["type"] == kind else self._begin_item(kind)
        self._text.append(text)
        place = self._place() | {"content_index": 0, "delta": text}
        if kind == "reasoning":
            return events + self._event("response.reasoning_text.delta", **place)
        return events + self._event("response.output_text.delta", **place, logprobs=self._take_logprobs())

    def _take_logprobs(self) -> list[Json]:
        told: list[Json] = self._shape.logprobs(self._held_logprobs, 0)[0]["content"]
        self._held_logprobs = []
        self._logprobs += told
        return told

    def _call(self, piece: CallPiece) -> bytes:
        self._held_logprobs = []
        events = b""
        if piece.name:
            events = self._begin_item("function_call", call_id=piece.call_id, name=piece.name, arguments="")
        if piece.arguments:
            self._text.append(piece.arguments)
            events += self._event("response.function_call_arguments.delta", **self._place(), delta=piece.arguments)
        return events

    def _begin_item(self, kind: str, **fields: Any) -> bytes:
        events = self._close("completed")
        prefix = {"message": MESSAGE_ID, "reasoning": REASONING_ID, "function_call": CALL_ID}[kind]
        item: Json = {"type": kind, "id": f"{prefix}{self._request_id}_{len(self._items)}", "status": "in_progress"}
        item |= fields
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._open = item
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind != "function_call":
            events += self._event("response.content_part.added", **self._place(), content_index=0, part=self._part())
        return events

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        if item["type"] == "message":
            self._take_logprobs()
        text, part = "".join(self._text), self._part()
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            named = {"name": item["name"], "arguments": text}
            events = self._event("response.function_call_arguments.done", **self._place(), **named)
        else:
            item["content"] = [part]
            place = self._place() | {"content_index": 0}
            is_message = item["type"] == "message"
            kind = "response.output_text.done" if is_message else "response.reasoning_text.done"
            events = self._event(kind, **place, text=text, **({"logprobs": self._logprobs} if is_message else {}))
            events += self._event("response.content_part.done", **place, part=part)
        events += self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open, self._text, self._logprobs = None, [], []
        return events

    def _part(self) -> Json:
        assert self._open is not None
        text = "".join(self._text)
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _place(self) -> Json:
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._tells:
            return b""
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(body, kind)


def new_response(
    shape: ChatShape, core: GatewayCore, body: ResponsesRequest, request_id: str, model: str, tells: bool
) -> GrowingResponse:
    """An answer to ``body`` that is empty yet, for ``GrowingAnswers``."""
    return GrowingResponse(body, request_id, model, shape, tells=tells)


def _head(body: ResponsesRequest, request_id: str, model: str) -> Json:
    choice = body.tool_choice
    form: Json = {"type": "text"}
    if body.text is not None and (told := body.text.format) is not None:
        form = {"type": told.type}
        if told.type == "json_schema":
            form |= {"name": told.name, "schema": told.json_schema, "strict": told.strict}
    return {
        "id": f"{RESPONSE_ID}{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": form},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user or None,
    }


def _usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
