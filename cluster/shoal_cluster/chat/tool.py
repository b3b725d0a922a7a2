"""Tools that a model may call, and its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal_replica.errors import InvalidArgument

MAX_TOOLS = 128
MAX_LENGTH = 262_144  # characters of all definitions together, and of what else goes to the template
MAX_DEPTH = 64  # of nested objects and lists in these: some templates indent them
NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,128}"
AUTO, NONE, REQUIRED = "auto", "none", "required"
MODES = (AUTO, NONE, REQUIRED)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. Raises InvalidArgument for a name that no model could be relied on to spell,
    and for parameters that are no schema of an object.

    Attributes:
        parameters: the JSON schema of its arguments, an object.
        strict: the arguments of every call match the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise InvalidArgument("name", self.name, f"must match {NAME_PATTERN}")
        if self.parameters.get("type", "object") != "object":
            raise InvalidArgument("parameters.type", self.parameters["type"], "must be 'object'")
        if not isinstance(self.parameters.get("properties", {}), Mapping):
            raise InvalidArgument("parameters.properties", self.parameters["properties"], "must be an object")
        json_text("parameters", self.parameters)

    def definition(self) -> dict[str, Any]:
        """As chat templates show it to the model."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model has made. ``arguments`` is JSON text, as the model wrote it; empty if there are none."""

    call_id: str
    name: str
    arguments: str

    def turn(self) -> dict[str, Any]:
        """As chat templates read it: those of most models expect the arguments as an object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools a model may or must call. Raises InvalidArgument for tools that contradict each other or the choice,
    and for too many or too long ones.

    Attributes:
        mode: AUTO, the model may call some; NONE, it may not; REQUIRED, it must.
        named: with REQUIRED, the only one that it calls.
        parallel: it may make several calls at once; not where one is named.
    """

    tools: tuple[Tool, ...]
    mode: str = AUTO
    named: str = ""
    parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise InvalidArgument("tools", f"{len(names)} tools", f"must be at most {MAX_TOOLS}")
        if self.length > MAX_LENGTH:
            raise InvalidArgument("tools", f"{self.length} characters", f"must have at most {MAX_LENGTH} together")
        if repeated := {name for name in names if names.count(name) > 1}:
            raise InvalidArgument("tools", sorted(repeated), "each name must be given once")
        if self.mode not in MODES:
            raise InvalidArgument("tool_choice", self.mode, f"must be one of {', '.join(MODES)}, or name a tool")
        if self.mode == REQUIRED and not names:
            raise InvalidArgument("tool_choice", self.named or self.mode, "needs tools")
        if self.named and self.named not in names:
            raise InvalidArgument("tool_choice", self.named, f"must be one of the tools: {', '.join(names)}")
        if self.named:
            object.__setattr__(self, "parallel", False)

    @property
    def length(self) -> int:
        """Characters of all definitions."""
        return sum(len(json.dumps(tool.definition(), ensure_ascii=False)) for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == NONE:
            return ()
        return tuple(tool for tool in self.tools if self.named in ("", tool.name))


def json_text(where: str, value: Any, max_length: float = MAX_LENGTH) -> str:
    """``value`` as JSON. Raises InvalidArgument if it is too deep or too long, or cannot be spelled in UTF-8."""
    if is_deep(value):
        raise InvalidArgument(where, type(value).__name__, f"must be nested at most {MAX_DEPTH} times")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidArgument(where, None, "must be JSON, which has no NaN and no infinity") from None
    if len(text) > max_length:
        raise InvalidArgument(where, f"{len(text)} characters", f"must have at most {max_length}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(where, text, "must be valid Unicode, without lone surrogates") from None
    return text


def is_deep(value: Any) -> bool:
    """Whether it is nested more than ``MAX_DEPTH`` times."""
    layer, depth = [value], 0
    while layer and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for each in layer:
            inner += each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else ()
        layer, depth = inner, depth + 1
    return bool(layer)
