"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and the call that they become.

https://platform.claude.com/docs/en/api/messages. Prefixes are cached without being asked for, so `cache_control` is
ignored, as all unknown fields are. So are budgets of thinking, which `max_tokens` bounds, and whether a result is an
error, of which templates know nothing. Where the conversation ends with the assistant's turn, the answer goes on with
it. vLLM's extra fields are chat_template_kwargs, priority and cache_salt. What else would change the answer but is not
supported here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shoal_cluster.chat.message import Message, as_one
from shoal_cluster.chat.tool import AUTO, MAX_TOOLS, NONE, REQUIRED, Tool, ToolCall, ToolUse, json_text
from shoal_cluster.policies.pending_request import MAX_PRIORITY
from shoal_cluster.serve.call import GenerateCall, Prompt
from shoal_cluster.serve.http.fields import (
    Body,
    ListOf,
    TemplateOptions,
    Text,
    TextOrNull,
    TextPart,
    Unsupported,
    WholeBody,
    at_most,
    effort_options,
    instead_of_null,
    left_out,
    renamed,
    text_of,
    top_p_of,
)
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.structured_output import StructuredOutput

ASSISTANT, SYSTEM, USER, TOOL = "assistant", "system", "user", "tool"
CUSTOM = "custom"  # of tools: the client's own
MODES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}
# Some agents begin the system prompt with such a line, another one in each request: no prefix would ever be reused.
BILLING = "x-anthropic-billing-header:"
TEXTS_ONLY = "only text, thinking, tool_use and tool_result are served"
# Fields of calls, as bodies have them.
WORDS = {
    "stop": "stop_sequences",
    "structured_output": "output_config.format",
    "continue_final_message": "messages",
    "prompt": "messages",
    "text": "messages",
    "tenant": "metadata.user_id",
}


class Block(TextPart):
    """A part of a turn: text, thinking, a call, or the result of one."""

    thinking: Text = ""
    id: TextOrNull = ""
    name: TextOrNull = ""
    input: dict[str, Any] | None = None
    tool_use_id: TextOrNull = ""
    content: Text | ListOf[TextPart] | None = None


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | ListOf[Block]

    def messages(self, where: str, *, is_first: bool) -> Iterator[Message]:
        """What it says, in order: results of calls are messages of their own. Templates know a system message only
        where a chat begins; one within is told in its place, as the user's. Raises InvalidArgument.
        """
        if isinstance(self.content, str):
            yield Message(USER if self.role == SYSTEM and not is_first else self.role, self.content)
            return
        places = [(f"{where}.{number}", block) for number, block in enumerate(self.content)]
        if self.role == ASSISTANT:
            yield self._answer(places)
            return
        if not places:
            raise InvalidArgument(where, [], "must not be empty")
        for place, block in places:
            if block.type == "text":
                yield Message(USER if self.role == SYSTEM and not is_first else self.role, block.text)
            elif block.type == "tool_result" and self.role == USER:
                text = text_of(f"{place}.content", block.content or "")
                yield Message(TOOL, text, tool_call_id=block.tool_use_id)
            else:
                raise _misplaced(place, block)

    def _answer(self, places: list[tuple[str, Block]]) -> Message:
        """The assistant's: texts are parts of one."""
        texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
        for place, block in places:
            if block.type == "text":
                texts.append(block.text)
            elif block.type == "thinking":
                thoughts.append(block.thinking)
            elif block.type == "tool_use":
                if not block.name:
                    raise InvalidArgument(f"{place}.name", None, "must be set")
                calls.append(ToolCall(block.id, block.name, json_text(f"{place}.input", block.input or {}, math.inf)))
            elif block.type != "redacted_thinking":
                raise _misplaced(place, block)
        return Message(ASSISTANT, "".join(texts), tuple(calls), reasoning="\n".join(filter(None, thoughts)))


def _misplaced(place: str, block: Block) -> InvalidArgument:
    return InvalidArgument(f"{place}.type", block.type, f"{TEXTS_ONLY}, each in turns of its role")


class ToolBody(Body):
    type: TextOrNull = ""
    name: Text
    description: TextOrNull = ""
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, where: str) -> Tool:
        """Raises InvalidArgument."""
        if self.type not in ("", CUSTOM):
            raise InvalidArgument(f"{where}.type", self.type, "only tools of the client's own ('custom') are served")
        schema = {key: value for key, value in (self.input_schema or {}).items() if value is not None}
        try:
            return Tool(self.name, self.description, schema, bool(self.strict))
        except InvalidArgument as error:
            raise error.renamed(f"{where}.{error.field.replace('parameters', 'input_schema')}") from None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: TextOrNull = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Text  # other ones than "disabled" differ in when and how much, which is the model's choice


class Edit(Body):
    """Of the context. One that keeps all, as some agents ask for, is none."""

    type: Text
    keep: Any = None


def _keeps_all(edit: Edit) -> Edit:
    if edit.keep != "all":
        raise ValueError("would change the prompt, which is not supported; leave it out")
    return edit


class ContextManagement(Body):
    edits: ListOf[Annotated[Edit, AfterValidator(_keeps_all)]] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Text | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: TextOrNull = ""


class Conversation(WholeBody):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    model: TextOrNull = ""
    messages: ListOf[Turn]
    system: Text | ListOf[TextPart] | None = None
    tools: Annotated[ListOf[ToolBody], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where earlier clients have the one of `output_config`
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateOptions | None = None
    mcp_servers: Unsupported = None
    container: Unsupported = None
    thread: Unsupported = None
    compaction: Unsupported = None

    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        if not self.messages:
            raise InvalidArgument("messages", [], "must have at least one message")
        messages = self._messages()
        last = messages[-1]
        end = PromptEnd.CONTINUED if last.role == ASSISTANT and not last.tool_calls else PromptEnd.ANSWER
        return Prompt(None, messages, self._tool_use(), self._template_options(), end)

    def in_its_words(self, error: Exception) -> Exception:
        """``error`` with the field that the body has for it."""
        return renamed(error, WORDS)

    def _messages(self) -> tuple[Message, ...]:
        """The turns, those of one role in a row as one: many templates want roles to alternate."""
        parts = [self.system] if isinstance(self.system, str) else [text_of("system", [p]) for p in self.system or ()]
        told = "\n\n".join(filter(None, map(_told, parts)))
        messages = [Message(SYSTEM, told)] if told else []
        for number, turn in enumerate(self.messages):
            messages += turn.messages(f"messages.{number}.content", is_first=number == 0)
        runs = ((role, list(run)) for role, run in groupby(messages, key=lambda message: message.role))
        return tuple(turn for role, run in runs for turn in (run if role == TOOL else [as_one(run)]))

    def _tool_use(self) -> ToolUse | None:
        choice = self.tool_choice or ToolChoice(type="auto")
        if not self.tools and choice.type in ("auto", "none"):
            return None
        if choice.type == "tool" and not choice.name:
            raise InvalidArgument("tool_choice.name", None, "must be set")
        if not self.tools:
            raise InvalidArgument("tool_choice", choice.type, "needs tools")
        return ToolUse(
            tools=tuple(body.tool(f"tools.{number}") for number, body in enumerate(self.tools)),
            mode=MODES[choice.type],
            named=choice.name if choice.type == "tool" else "",
            parallel=not choice.disable_parallel_tool_use,
        )

    def _template_options(self) -> dict[str, Any]:
        """Variables of the template: whether to think has two names among models."""
        options: dict[str, Any] = {}
        if self.thinking is not None:
            options["enable_thinking"] = options["thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None:
            options |= effort_options(self.output_config.effort)
        return options | (self.chat_template_kwargs or {})


class MessagesRequest(Conversation):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[Text] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    priority: Annotated[int, instead_of_null(0)] = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: TextOrNull = ""

    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """The body's only call, in a list. Raises InvalidArgument."""
        prompt = self.to_prompt()
        call = GenerateCall(
            request_id=request_id,
            sampling_params=self._sampling_params(),
            left_out=left_out(self),
            model=self.model,
            messages=prompt.messages,
            tools=prompt.tools,
            template_options=prompt.template_options,
            prompt_end=prompt.end,
            priority=self.priority,
            tenant="" if self.metadata is None else self.metadata.user_id,
            cache_salt=self.cache_salt,
        )
        return [call]

    def _sampling_params(self) -> SamplingParams:
        given = {"temperature": self.temperature, "top_p": top_p_of(self.top_p), "top_k": self.top_k}
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            structured_output=None if form is None else StructuredOutput.json_schema(form.json_schema),
            **present,
        )


def _told(text: str) -> str:
    """A system prompt without the line that differs from request to request."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text
