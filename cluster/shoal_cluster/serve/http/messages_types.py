"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and the call that they become.

https://platform.claude.com/docs/en/api/messages. Prefixes are cached without being asked for, so `cache_control` is
ignored, as all unknown fields are. Where the conversation ends with the assistant's turn, the answer goes on with it.
vLLM's extra fields are chat_template_kwargs, priority and cache_salt. What would change the answer but is not supported
here is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import AUTO, NONE, REQUIRED, Tool, ToolCall, ToolUse
from shoal_cluster.policies.held import MAX_PRIORITY
from shoal_cluster.serve.call import GenerateCall, Prompt
from shoal_cluster.serve.http.openai_fields import Body, Text, TextOrNull, Unsupported, instead_of_null
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
WORDS = {"stop": "stop_sequences", "structured_output": "output_config.format"}  # fields of calls, as bodies have them


class TextBlock(Body):
    type: Text
    text: Text = ""


class Block(TextBlock):
    """A part of a turn: text, thinking, a call, or the result of one."""

    thinking: Text = ""
    id: TextOrNull = ""
    name: TextOrNull = ""
    input: dict[str, Any] | None = None
    tool_use_id: TextOrNull = ""
    content: Text | list[TextBlock] | None = None


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    def messages(self, where: str) -> Iterator[Message]:
        """What it says, in order: results of calls are messages of their own. Raises InvalidArgument."""
        blocks = [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        for number, block in enumerate(blocks):
            place = where if isinstance(self.content, str) else f"{where}.{number}"
            if block.type == "text":
                yield Message(self._role, block.text)
            elif block.type == "tool_result" and self.role == USER:
                yield Message(TOOL, _text(f"{place}.content", block.content or ""), tool_call_id=block.tool_use_id)
            elif block.type == "tool_use" and self.role == ASSISTANT:
                if not block.name:
                    raise InvalidArgument(f"{place}.name", None, "must be set")
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                yield Message(ASSISTANT, "", (ToolCall(block.id, block.name, arguments),))
            elif block.type == "thinking" and self.role == ASSISTANT:
                yield Message(ASSISTANT, "", reasoning=block.thinking)
            elif block.type != "redacted_thinking":
                raise InvalidArgument(f"{place}.type", block.type, f"{TEXTS_ONLY}, each in turns of its role")

    @property
    def _role(self) -> str:
        """Templates know a system message only where a chat begins; one within is told in its place, as the user's."""
        return USER if self.role == SYSTEM else self.role


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
        try:
            return Tool(self.name, self.description, self.input_schema or {}, bool(self.strict))
        except InvalidArgument as error:
            raise error.renamed(f"{where}.{error.field.replace('parameters', 'input_schema')}") from None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: TextOrNull = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Text | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: TextOrNull = ""


class Conversation(Body):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    model: TextOrNull = ""
    messages: list[Turn]
    system: Text | list[TextBlock] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    mcp_servers: Unsupported = None
    container: Unsupported = None

    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        messages = self._messages()
        if not messages:
            raise InvalidArgument("messages", [], "must have at least one message")
        last = messages[-1]
        end = PromptEnd.CONTINUED if last.role == ASSISTANT and not last.tool_calls else PromptEnd.ANSWER
        return Prompt(None, messages, self._tool_use(), self._template_options(), end)

    def in_its_words(self, error: Exception) -> Exception:
        """``error`` with the field that the body has for it."""
        if isinstance(error, InvalidArgument) and error.field in WORDS:
            return error.renamed(WORDS[error.field])
        return error

    def _messages(self) -> tuple[Message, ...]:
        """The turns, those of one role in a row as one: many templates want roles to alternate."""
        system = self.system or ""
        lines = [_told(system)] if isinstance(system, str) else [_told(_text("system", [part])) for part in system]
        told = "\n\n".join(filter(None, lines))
        messages = [Message(SYSTEM, told)] if told else []
        for number, turn in enumerate(self.messages):
            for message in turn.messages(f"messages.{number}.content"):
                if messages and messages[-1].role == message.role != TOOL:
                    messages[-1] = messages[-1].joined(message)
                else:
                    messages.append(message)
        return tuple(messages)

    def _tool_use(self) -> ToolUse | None:
        choice = self.tool_choice or ToolChoice(type="auto")
        if not self.tools and choice.type in ("auto", "none"):
            return None
        if choice.type == "tool" and not choice.name:
            raise InvalidArgument("tool_choice.name", None, "must be set")
        return ToolUse(
            tools=tuple(body.tool(f"tools.{number}") for number, body in enumerate(self.tools or ())),
            mode=MODES[choice.type],
            named=choice.name if choice.type == "tool" else "",
            parallel=not choice.disable_parallel_tool_use,
        )

    def _template_options(self) -> dict[str, Any]:
        """Variables of the template: whether to think has two names among models."""
        options: dict[str, Any] = {}
        if self.thinking is not None:
            options["enable_thinking"] = options["thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options | (self.chat_template_kwargs or {})


class MessagesRequest(Conversation):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Text] | None = None
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
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        form = None if self.output_config is None else self.output_config.format
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            structured_output=None if form is None else StructuredOutput.json_schema(form.json_schema),
            **present,
        )


def _told(text: str) -> str:
    """A system prompt without the line that differs from request to request."""
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _text(where: str, content: str | list[TextBlock]) -> str:
    """Raises InvalidArgument."""
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise InvalidArgument(where, block.type, "only blocks of type 'text' are served")
    return "\n".join(block.text for block in content)
