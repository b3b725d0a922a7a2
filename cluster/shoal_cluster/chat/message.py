"""One turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence
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


def as_one(turns: Sequence[Message]) -> Message:
    """Turns of one role, at least one, as a single turn."""
    if len(turns) == 1:
        return turns[0]
    content = "\n".join(turn.content for turn in turns if turn.content)
    reasoning = "\n".join(turn.reasoning for turn in turns if turn.reasoning)
    return Message(
        turns[0].role, content, tuple(call for turn in turns for call in turn.tool_calls), reasoning=reasoning
    )
