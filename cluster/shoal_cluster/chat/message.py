"""One turn of a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_cluster.chat.tool import ToolCall


@dataclass(frozen=True, slots=True)
class Message:
    """What one role has said.

    Attributes:
        tool_calls: what the assistant called in this turn.
        tool_call_id: the call that this turn, of the role "tool", has the result of.
        name: of who says it, where the template shows that.
        reasoning: what the assistant thought first.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def length(self) -> int:
        """Its characters."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return sum(map(len, (self.role, self.content, self.reasoning, self.name, self.tool_call_id))) + calls

    def joined(self, more: Message) -> Message:
        """This turn and ``more``, of the same role, as one."""
        content = "\n".join(filter(None, (self.content, more.content)))
        reasoning = "\n".join(filter(None, (self.reasoning, more.reasoning)))
        return Message(self.role, content, (*self.tool_calls, *more.tool_calls), reasoning=reasoning)

    def turn(self) -> dict[str, Any]:
        """As chat templates read it. What it has not is left out, for some templates only ask whether it is there."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [call.turn() for call in self.tool_calls]
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        for key in ("tool_call_id", "name"):
            if text := getattr(self, key):
                turn[key] = text
        return turn
