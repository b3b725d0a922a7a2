"""Tools for models whose chat template knows none: told in the system message, called in the notation of Hermes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal_cluster.chat.chat_format import HERMES
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import Tool

GUIDE = """You can call functions. These are their definitions, one a line:
<tools>
{definitions}
</tools>
To call one, answer with its name and its arguments as a JSON object between two tags, one such pair for each call:
{opening}
{{"name": "...", "arguments": {{...}}}}
{closing}"""


def turns_with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """``messages`` as turns of the roles that every template knows. Calls and their results become text: results that
    follow each other one turn of the user.
    """
    turns: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        content = "\n".join(filter(None, [message.content, *map(_call, message.tool_calls)]))
        was_result, is_result = is_result, message.role == "tool"
        if is_result:
            content = f"<tool_response>\n{message.content}\n</tool_response>"
        if is_result and was_result:
            turns[-1]["content"] += f"\n{content}"
        else:
            turns.append({"role": "user" if is_result else message.role, "content": content})
    if not tools:
        return turns
    definitions = "\n".join(json.dumps(tool.definition(), ensure_ascii=False) for tool in tools)
    guide = GUIDE.format(definitions=definitions, opening=HERMES.opening, closing=HERMES.closing)
    if turns and turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{guide}"}, *turns[1:]]
    return [{"role": "system", "content": guide}, *turns]


def _call(call: Any) -> str:
    turn = call.turn()["function"]
    return f"{HERMES.opening}\n{json.dumps(turn, ensure_ascii=False)}\n{HERMES.closing}"
