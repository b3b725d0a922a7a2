"""Tools for models whose chat template knows none: told in the first turn, called in the notation of Hermes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal_cluster.chat.chat_format import HERMES
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import Tool

SYSTEM, USER, TOOL = "system", "user", "tool"
GUIDE = """You can call functions. These are their definitions, one a line:
<tools>
{definitions}
</tools>
To call one, answer with its name and its arguments as a JSON object between two tags, one such pair for each call:
{opening}
{{"name": "...", "arguments": {{...}}}}
{closing}"""


def turns_with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """``messages`` as turns of the roles that every template knows. Calls and their results become text: results that
    follow each other, and what the user says then, one turn of the user, for some templates want roles to alternate.

    Args:
        takes_system: the template knows system turns; else the first turn is the user's, and tells of the tools.
    """
    turns: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        turn = _told(message).turn()
        is_result = message.role == TOOL
        if was_result and turn["role"] == USER:
            turns[-1]["content"] += f"\n{turn['content']}"
        else:
            turns.append(turn)
        was_result = is_result
    return _with_guide(turns, tools, SYSTEM if takes_system else USER) if tools else turns


def _told(message: Message) -> Message:
    """A message without calls, and of no other role than others have."""
    if message.role == TOOL:
        return Message(USER, f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    content = "\n".join(filter(None, [message.content, *map(_call, message.tool_calls)]))
    return replace(message, content=content, tool_calls=())


def _with_guide(turns: list[dict[str, Any]], tools: Sequence[Tool], role: str) -> list[dict[str, Any]]:
    """``turns`` of which the first, of that role, tells of the tools."""
    definitions = "\n".join(json.dumps(tool.definition(), ensure_ascii=False) for tool in tools)
    guide = GUIDE.format(definitions=definitions, opening=HERMES.opening, closing=HERMES.closing)
    if not turns or turns[0]["role"] != role:
        return [{"role": role, "content": guide}, *turns]
    content = turns[0]["content"]
    told = f"{content}\n\n{guide}" if role == SYSTEM else f"{guide}\n\n{content}"
    return [turns[0] | {"content": told}, *turns[1:]]


def _call(call: Any) -> str:
    turn = call.turn()["function"]
    return f"{HERMES.opening}\n{json.dumps(turn, ensure_ascii=False)}\n{HERMES.closing}"
