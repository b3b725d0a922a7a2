"""Chats of `shoal.v1.Generation`, with their tools: proto to domain and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import AUTO, MAX_TOOLS, NONE, REQUIRED, Tool, ToolCall, ToolUse
from shoal_cluster.serve.call import MAX_ENTRIES, Prompt
from shoal_protos import generation_pb2 as pb
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument

_MODES_BACK = {AUTO: pb.TOOL_MODE_AUTO, NONE: pb.TOOL_MODE_NONE, REQUIRED: pb.TOOL_MODE_REQUIRED}
_ENDS_BACK = {
    PromptEnd.ANSWER: pb.PROMPT_END_UNSPECIFIED,
    PromptEnd.CLOSED: pb.PROMPT_END_CLOSED,
    PromptEnd.CONTINUED: pb.PROMPT_END_CONTINUED,
}
_ENDS = {number: end for end, number in _ENDS_BACK.items()} | {pb.PROMPT_END_ANSWER: PromptEnd.ANSWER}
_MODES = {number: mode for mode, number in _MODES_BACK.items()} | {pb.TOOL_MODE_UNSPECIFIED: AUTO}


def prompt_from_proto(chat: pb.ChatMessages) -> Prompt:
    """Raises InvalidArgument for tools, options of the template, or an end that are malformed, or for too many."""
    if len(chat.messages) > MAX_ENTRIES or sum(1 + len(turn.tool_calls) for turn in chat.messages) > MAX_ENTRIES:
        limit = f"must be at most {MAX_ENTRIES}, with their tool calls"
        raise InvalidArgument("messages", f"{len(chat.messages)} messages", limit)
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"{len(chat.tools)} tools", f"must be at most {MAX_TOOLS}")
    if chat.prompt_end not in _ENDS:
        raise InvalidArgument("prompt_end", chat.prompt_end, "must be a PromptEnd")
    end = _ENDS[chat.prompt_end]
    messages = tuple(_message_from_proto(message) for message in chat.messages)
    options = _json_object("template_options", chat.template_options) if chat.template_options else {}
    choice = chat.WhichOneof("tool_choice")
    if not (chat.tools or choice):
        return Prompt(messages=messages, template_options=options, end=end)
    is_named = choice == "tool_name"
    if is_named and not chat.tool_name:
        raise InvalidArgument("tool_name", "", "must name a tool")
    if chat.tool_mode not in _MODES:
        raise InvalidArgument("tool_mode", chat.tool_mode, "must be a ToolMode")
    use = ToolUse(
        tools=tuple(_tool_from_proto(position, tool) for position, tool in enumerate(chat.tools)),
        mode=REQUIRED if is_named else _MODES[chat.tool_mode],
        named=chat.tool_name,
        parallel=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
    )
    return Prompt(messages=messages, tools=use, template_options=options, end=end)


def messages_to_proto(
    messages: Sequence[Message], use: ToolUse | None, options: Mapping[str, Any], end: PromptEnd
) -> pb.ChatMessages:
    told = [_message_to_proto(message) for message in messages]
    chat = pb.ChatMessages(messages=told, prompt_end=_ENDS_BACK[end])
    if options:
        chat.template_options = json.dumps(options)
    if use is not None:
        chat.tools.extend(_tool_to_proto(tool) for tool in use.tools)
        chat.parallel_tool_calls = use.parallel
        if use.named:
            chat.tool_name = use.named
        else:
            chat.tool_mode = _MODES_BACK[use.mode]
    return chat


def _message_from_proto(message: pb.ChatMessage) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return Message(message.role, message.content, calls, message.tool_call_id, message.name, message.reasoning)


def _message_to_proto(message: Message) -> pb.ChatMessage:
    calls = [pb.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _tool_from_proto(position: int, tool: pb.Tool) -> Tool:
    where = f"messages.tools.{position}"
    parameters = _json_object(f"{where}.parameters", tool.parameters) if tool.parameters else {}
    try:
        return Tool(tool.name, tool.description, parameters, tool.strict)
    except InvalidArgument as error:
        raise InvalidArgument.retold(f"{where}.{error.field}", f"{where}.{error}") from None


def _tool_to_proto(tool: Tool) -> pb.Tool:
    parameters = json.dumps(dict(tool.parameters)) if tool.parameters else ""
    return pb.Tool(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


def _json_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(field, text, "must be a JSON object, as text")
    return value
