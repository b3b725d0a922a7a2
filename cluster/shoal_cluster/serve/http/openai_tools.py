"""How OpenAI's API says what a model may call, and what it has called."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from shoal_cluster.chat.tool import AUTO, REQUIRED, Tool, ToolCall, ToolUse, json_text
from shoal_cluster.serve.http.fields import Body, Name, Text, TextOrNull
from shoal_replica.errors import InvalidArgument


class FunctionBody(Body):
    name: Text
    description: TextOrNull = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, where: str) -> Tool:
        """Raises InvalidArgument, the field being one of ``where``."""
        try:
            return Tool(self.name, self.description, self.parameters or {}, bool(self.strict))
        except InvalidArgument as error:
            raise error.renamed(f"{where}.{error.field}") from None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def tool(self, position: int) -> Tool:
        """Raises InvalidArgument."""
        return self.function.tool(f"tools.{position}.function")


class NameBody(Body):
    name: Name


class NamedChoice(Body):
    type: Literal["function"]
    function: NameBody


ToolChoice = Literal["auto", "none", "required"] | NamedChoice


def tool_use(tools: list[ToolBody] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """None where a request says nothing of tools. Raises InvalidArgument."""
    if not tools and choice in (None, "auto", "none"):
        return None
    return ToolUse(
        tools=tuple(body.tool(position) for position, body in enumerate(tools or ())),
        mode=REQUIRED if isinstance(choice, NamedChoice) else choice or AUTO,
        named=choice.function.name if isinstance(choice, NamedChoice) else "",
        parallel=parallel is not False,
    )


class CalledBody(Body):
    name: Text
    arguments: Text | dict[str, Any] | None = Field("")


class CallBody(Body):
    """A call within the assistant's turn that made it."""

    id: TextOrNull = ""
    type: Literal["function"] = "function"
    function: CalledBody

    def call(self) -> ToolCall:
        """Raises InvalidArgument."""
        arguments = self.function.arguments or ""
        text = arguments if isinstance(arguments, str) else json_text("messages", arguments, math.inf)
        return ToolCall(self.id, self.function.name, text or "{}")
