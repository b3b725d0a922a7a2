"""Tagged values of tool calls: their schema says whether they are text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal_cluster.chat.schema_values import Values
from shoal_cluster.chat.xml_call import GLM_XML, XmlCall

OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
OPTIONAL_FLAG = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
DEFINED = {"City": {"type": "string"}, "Again": {"$ref": "#/$defs/Again"}, "a/b": {"type": "boolean"}}


def read(value: str, schema: object) -> Any:
    """The argument that a tagged ``value`` becomes."""
    call = XmlCall(GLM_XML, "find", {"find": {"properties": {"key": schema}, "$defs": DEFINED}})
    call.push(f"<arg_key>key</arg_key><arg_value>{value}</arg_value></tool_call>")
    assert call.is_done
    return json.loads(call.take_arguments())["key"]


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("123", OPTIONAL_TEXT, "123"),
        ("true", OPTIONAL_TEXT, "true"),
        ("null", OPTIONAL_TEXT, None),
        ("True", OPTIONAL_FLAG, True),
        ("null", OPTIONAL_FLAG, None),
        ("FALSE", {"type": ["boolean", "null"]}, False),
        ("True", {"enum": [True]}, True),
        ("5", {"const": "5"}, "5"),
        ("5", {"const": 5}, 5),
        ("1", {"oneOf": [{"enum": ["1", "2"]}, {"type": "integer"}]}, "1"),
        ("3", {"oneOf": [{"enum": ["1", "2"]}, {"type": "integer"}]}, 3),
        ("12", {"$ref": "#/$defs/City"}, "12"),
        ("12", {"allOf": [{"$ref": "#/$defs/City"}]}, "12"),
        ("True", {"$ref": "#/$defs/a~1b"}, True),
        ("12", {"$ref": "#/$defs/none/of/them"}, 12),
        ("12", {"$ref": "https://elsewhere"}, 12),
        ("12", {"$ref": "#/$defs/Again"}, 12),
        ("12", True, 12),
        ("12", {"type": 4, "anyOf": {}, "enum": "no list"}, 12),
        ("[1, 2", {"type": "array"}, "[1, 2"),
    ],
)
def test_only_the_schema_tells_text_from_other_values(value: str, schema: object, expected: Any) -> None:
    assert read(value, schema) == expected


def test_a_schema_that_refers_to_itself_many_times_is_read_once() -> None:
    again = {"$ref": "#/$defs/A"}
    root = {"$defs": {"A": {"anyOf": [*[again] * 200, {"oneOf": [again, {"type": "string"}]}]}}}
    assert Values.of(again, root).are_text
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert Values.of(deep, {}).are_text
