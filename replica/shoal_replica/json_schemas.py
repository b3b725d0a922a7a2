"""JSON schemas without the keywords that enforce nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Those that llguidance enforces, where a value may be a string; of others it refuses the schema."""

EXPLANATIONS = frozenset({"title", "description", "examples", "default", "$comment", "deprecated"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # schemas by names
_VALUES = frozenset({"const", "enum", "required", "default", "examples"})


def bare(schema: Any) -> Any:
    """A schema without what only explains it."""
    return _without(schema, lambda key, _: key in EXPLANATIONS)


def without_unknown_formats(schema: Any) -> Any:
    """A schema without formats that are not enforced, such as OpenAPI's: to JSON Schema these are annotations."""
    return _without(schema, lambda key, value: key == "format" and isinstance(value, str) and value not in FORMATS)


def _without(schema: Any, is_idle: Callable[[str, Any], bool]) -> Any:
    if isinstance(schema, list):
        return [_without(each, is_idle) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    left: dict[str, Any] = {}
    for key, value in schema.items():
        if is_idle(key, value):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            left[key] = {name: _without(each, is_idle) for name, each in value.items()}
        else:
            left[key] = value if key in _VALUES else _without(value, is_idle)
    return left
