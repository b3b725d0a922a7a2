"""The body of OpenAI's `/v1/chat/completions`, and the call that it becomes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import MAX_TOOLS
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.http.fields import (
    Body,
    ListOf,
    TemplateOptions,
    Text,
    TextOrNull,
    TextPart,
    Unsupported,
    at_most,
    effort_options,
    left_out,
    only,
    text_of,
)
from shoal_cluster.serve.http.openai_tools import CallBody, ToolBody, ToolChoice, tool_use
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import MAX_LOGPROBS


class ChatTurn(Body):
    role: Text
    content: Text | ListOf[TextPart] | None = None
    tool_calls: ListOf[CallBody] | None = None
    tool_call_id: TextOrNull = ""
    name: TextOrNull = ""
    reasoning_content: TextOrNull = ""
    reasoning: TextOrNull = ""  # the same, as vLLM spells it
    function_call: Unsupported = None
    audio: Unsupported = None

    def to_message(self, position: int) -> Message:
        content = "" if self.content is None and self.role == "assistant" else self.content
        return Message(
            self.role,
            text_of(f"messages.{position}.content", content, ("text", "refusal")),
            tuple(body.call() for body in self.tool_calls or ()),
            self.tool_call_id,
            self.name,
            self.reasoning_content or self.reasoning,
        )


def prompt_end(adds_generation_prompt: bool | None, continues_final_message: bool | None) -> PromptEnd:
    """Raises InvalidArgument if both are asked for."""
    if continues_final_message and adds_generation_prompt:
        raise InvalidArgument("continue_final_message", True, "contradicts add_generation_prompt")
    if continues_final_message:
        return PromptEnd.CONTINUED
    return PromptEnd.CLOSED if adds_generation_prompt is False else PromptEnd.ANSWER


class ChatRequest(RequestBody):
    """`POST /v1/chat/completions`."""

    messages: ListOf[ChatTurn]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[ListOf[ToolBody], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Text | None = None
    include_reasoning: Annotated[Any, only(True)] = None
    thinking_token_budget: Unsupported = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None  # {} asks for a search, too
    functions: Unsupported = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    echo: Unsupported = None
    add_special_tokens: Annotated[Any, only(False)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def words(self) -> dict[str, str]:
        return super().words | {"prompt": "messages", "text": "messages"}

    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """The body's only call, in a list. Raises InvalidArgument."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", self.top_logprobs, "needs logprobs to be true")
        if not self.messages:
            raise InvalidArgument("messages", [], "must have at least one message")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        call = GenerateCall(
            request_id=request_id,
            sampling_params=self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None),
            left_out=left_out(self),
            model=self.model,
            messages=tuple(turn.to_message(position) for position, turn in enumerate(self.messages)),
            tools=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            template_options=effort_options(self.reasoning_effort) | (self.chat_template_kwargs or {}),
            prompt_end=prompt_end(self.add_generation_prompt, self.continue_final_message),
            priority=self.priority,
            tenant=self.user,
            cache_salt=self.cache_salt,
        )
        return [call]
