"""The body of OpenAI's `/v1/responses`, and the call that it becomes.

Nothing is kept between responses: a client sends the whole conversation as `input`. vLLM's extra fields are those of
`openai_types.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal_cluster.chat.message import Message, as_one
from shoal_cluster.chat.tool import AUTO, MAX_TOOLS, REQUIRED, ToolCall, ToolUse
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.http.fields import (
    Body,
    ListOf,
    Name,
    TemplateOptions,
    Text,
    TextOrNull,
    TextPart,
    Unsupported,
    at_most,
    effort_options,
    instead_of_null,
    left_out,
    only,
    text_of,
)
from shoal_cluster.serve.http.openai_tools import FunctionBody
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import MAX_LOGPROBS
from shoal_replica.structured_output import StructuredOutput

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16  # as at OpenAI
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Item(Body):
    """An item of the conversation: a message, a call, its result, or reasoning."""

    type: TextOrNull = ""
    role: TextOrNull = ""
    content: Text | ListOf[TextPart] | None = None
    call_id: TextOrNull = ""
    name: TextOrNull = ""
    arguments: TextOrNull = ""
    output: Text | ListOf[TextPart] | None = None
    summary: ListOf[TextPart] | None = None  # of reasoning, where that is all there is


class _Typed(Body):
    type: Literal["function"]


class FunctionTool(FunctionBody, _Typed):  # the type is checked first
    pass


class NamedFunction(Body):
    type: Literal["function"]
    name: Name


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: TextOrNull = ""
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # answers match in either case


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class Reasoning(Body):
    effort: Text | None = None


class ResponsesRequest(RequestBody):
    """`POST /v1/responses`."""

    input: Text | ListOf[Item]
    instructions: TextOrNull = ""
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[ListOf[FunctionTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: ListOf[Text] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: Annotated[dict[Text, Text], at_most(MAX_METADATA), instead_of_null({})] = Field(default_factory=dict)
    chat_template_kwargs: TemplateOptions | None = None
    n: Annotated[Any, only(1)] = None
    return_token_ids: Unsupported = None
    truncation: Annotated[Any, only("disabled")] = None
    response_format: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None  # 0 asks for some, too
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    previous_input_messages: Unsupported = None
    enable_response_messages: Unsupported = None

    @property
    def words(self) -> dict[str, str]:
        form = super().words["structured_output"]
        is_own = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        return dict.fromkeys(("messages", "prompt", "text"), "input") | {
            "structured_output": "text.format" if is_own else form
        }

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """The body's only call, in a list. Raises InvalidArgument."""
        messages = _messages(self.instructions, self.input)
        if not messages:
            raise InvalidArgument("input", [], "must have at least one item")
        options = effort_options(None if self.reasoning is None else self.reasoning.effort) | (
            self.chat_template_kwargs or {}
        )
        max_tokens = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        call = GenerateCall(
            request_id=request_id,
            sampling_params=self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.has_logprobs else None),
            left_out=left_out(self),
            model=self.model,
            messages=messages,
            tools=self._tool_use(),
            template_options=options,
            priority=self.priority,
            tenant=self.user,
            cache_salt=self.cache_salt,
        )
        return [call]

    def _tool_use(self) -> ToolUse | None:
        if not self.tools and self.tool_choice in (None, "auto", "none"):
            return None
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else ""
        mode = REQUIRED if isinstance(self.tool_choice, NamedFunction) else self.tool_choice or AUTO
        tools = [body.tool(f"tools.{position}") for position, body in enumerate(self.tools or ())]
        return ToolUse(tuple(tools), mode, named, parallel=self.parallel_tool_calls is not False)

    def _structured_output(self) -> StructuredOutput | None:
        form = None if self.text is None else self.text.format
        other = super()._structured_output()
        if form is None or form.type == "text":
            return other
        if other is not None:
            raise InvalidArgument(
                "text.format", form.type, "must be the only field that says what an answer must match"
            )
        if form.type == "json_object":
            return StructuredOutput.json_object()
        if form.json_schema is None:
            raise InvalidArgument("text.format.schema", None, "must be set")
        return StructuredOutput.json_schema(form.json_schema)


def _messages(instructions: str, given: str | list[Item]) -> tuple[Message, ...]:
    """The items as turns: what the assistant thought, said and called before it got results is one turn, for templates
    want results right after calls.
    """
    if isinstance(given, str):
        given = [Item(role="user", content=given)] if given else []
    system = [instructions] if instructions else []
    turns: list[list[Message]] = []  # each of one role
    thoughts: list[str] = []
    can_join = False  # with an assistant's turn
    for position, item in enumerate(given):
        where, kind = f"input.{position}", item.type or "message"
        if kind == "reasoning":
            thoughts.append(_text(where, item.content or item.summary or ""))
        elif kind == "function_call_output":
            turns.append([Message("tool", _text(f"{where}.output", item.output), tool_call_id=item.call_id)])
            thoughts, can_join = [], False
        elif kind == "function_call" or (kind == "message" and item.role == "assistant"):
            turn = _assistant(where, item, "\n".join(thoughts))
            thoughts = []
            follows = bool(turns) and turns[-1][0].role == "assistant"
            if follows and (turn.tool_calls or can_join):
                turns[-1].append(replace(turn, content=turn.content.lstrip("\n")))
                can_join = True
            else:
                turns.append([turn])
                can_join = bool(turn.tool_calls)
        elif kind != "message":
            raise InvalidArgument(f"{where}.type", kind, "only messages, function calls and reasoning are served")
        elif not item.role:
            raise InvalidArgument(f"{where}.role", None, "must be set")
        elif item.role in ("system", "developer") and not turns:
            system.append(_text(f"{where}.content", item.content))
        else:
            turns.append([Message(item.role, _text(f"{where}.content", item.content))])
            thoughts, can_join = [], False
    return (*([Message("system", "\n\n".join(system))] if system else []), *map(as_one, turns))


def _assistant(where: str, item: Item, thought: str) -> Message:
    if item.type != "function_call":
        return Message("assistant", _text(f"{where}.content", item.content), reasoning=thought)
    for field in ("name", "call_id"):
        if not getattr(item, field):
            raise InvalidArgument(f"{where}.{field}", None, "must be set")
    return Message("assistant", "", (ToolCall(item.call_id, item.name, item.arguments),), reasoning=thought)


def _text(where: str, content: str | list[TextPart] | None) -> str:
    return text_of(where, content, TEXT_PARTS)
