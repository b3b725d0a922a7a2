"""Reads one tool call whose parameters are tagged, as its text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_cluster.chat.schema_values import Values
from shoal_cluster.chat.tool import NAME_PATTERN

MAX_TAG = 200  # characters of a tag with its name


@dataclass(frozen=True, slots=True)
class XmlNotation:
    """How a call is tagged.

    Attributes:
        head_start: what it begins with; empty: the name comes right behind the opening of calls.
        head: the pattern of all that comes before parameters, with the name, if one of them follows, or an end.
        part_of_head: a pattern of what may become a head.
        parameter: the pattern of all that comes before a value, with its key.
        parameter_start: what ``parameter`` begins with.
        end_of_value, end: the tags behind a value, and behind all.
        ends_by_closing: ``end`` is what closes calls, and is not part of this one.
        inner_tags: what ``parameter`` has between its beginning and the value, besides the key.
    """

    head_start: str
    head: re.Pattern[str]
    part_of_head: re.Pattern[str]
    parameter_start: str
    parameter: re.Pattern[str]
    end_of_value: str
    end: str
    ends_by_closing: bool = False
    inner_tags: tuple[str, ...] = ()

    @property
    def ends_of_value(self) -> tuple[str, ...]:
        """The tag; and, for a value that nothing closes, what comes next, on a line of its own."""
        return (self.end_of_value, f"\n{self.parameter_start}", f"\n{self.end}")

    @property
    def tags(self) -> tuple[str, ...]:
        """Those around keys and values that some models have as special tokens."""
        return (self.parameter_start, *self.inner_tags, self.end_of_value)

    def may_be_head(self, text: str) -> bool:
        """Whether ``text``, which is no whole head, may be the beginning of one."""
        return self.head_start.startswith(text) or self.part_of_head.fullmatch(text) is not None

    def may_be_next(self, text: str) -> bool:
        """Whether ``text``, in which no parameter begins as yet, may go on with one, or with the end."""
        return _may_become(text, (self.parameter_start, self.end), has_lines=self.ends_by_closing)


_GAP = r"\s{0,32}"
_PART_OF_TAG = r"(?:</?[\w:]{0,20})?"

QWEN_XML = XmlNotation(
    head_start="<function=",
    head=re.compile(rf"<function=({NAME_PATTERN})>{_GAP}(?=<parameter=|</function>|</tool_call>)"),
    part_of_head=re.compile(rf"<function=(?:{NAME_PATTERN}(?:>{_GAP}{_PART_OF_TAG})?)?"),
    parameter_start="<parameter=",
    parameter=re.compile(r"<parameter=([^>\n]{1,128})>"),
    end_of_value="</parameter>",
    end="</function>",
)
"""``<function=NAME>``, ``<parameter=KEY>VALUE</parameter>`` ..., ``</function>``: Qwen3-Coder's."""

MINIMAX_XML = XmlNotation(
    head_start='<invoke name="',
    head=re.compile(rf'<invoke name="({NAME_PATTERN})">{_GAP}(?=<parameter |</invoke>|</minimax:tool_call>)'),
    part_of_head=re.compile(rf'<invoke name="(?:{NAME_PATTERN}(?:"(?:>{_GAP}{_PART_OF_TAG})?)?)?'),
    parameter_start='<parameter name="',
    parameter=re.compile(r'<parameter name="([^"\n]{1,128})">'),
    end_of_value="</parameter>",
    end="</invoke>",
)
"""``<invoke name="NAME">``, ``<parameter name="KEY">VALUE</parameter>`` ..., ``</invoke>``: MiniMax-M2's."""

GLM_XML = XmlNotation(
    head_start="",
    head=re.compile(rf"({NAME_PATTERN}){_GAP}(?=<arg_key>|</tool_call>)"),
    part_of_head=re.compile(rf"{NAME_PATTERN}{_GAP}{_PART_OF_TAG}"),
    parameter_start="<arg_key>",
    parameter=re.compile(rf"<arg_key>([^<\n]{{1,128}})</arg_key>{_GAP}<arg_value>"),
    end_of_value="</arg_value>",
    end="</tool_call>",
    ends_by_closing=True,
    inner_tags=("</arg_key>", "<arg_value>"),
)
"""``NAME``, ``<arg_key>KEY</arg_key>``, ``<arg_value>VALUE</arg_value>`` ...: GLM-4.5's."""


class XmlCall:
    """Takes the text of a call behind its head in pieces. The attributes are those of JsonCall. Arguments come
    parameter by parameter.

    Args:
        schemas: by the name of a tool, the JSON schema of its arguments: only a type tells text from numbers.
    """

    def __init__(self, notation: XmlNotation, name: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._notation = notation
        self.name = name
        self.is_done = False
        self.has_failed = False
        self.rest = ""
        self._schemas = schemas
        self._unread = ""
        self._key: str | None = None
        self._searched = 0  # characters of ``_unread`` in which a parameter does not end
        self._keys: set[str] = set()
        self._new = ["{"]

    def push(self, text: str) -> int:
        """Take text. Returns how many of its characters belong to the call."""
        self._unread += text
        while self._step():
            pass
        if self.has_failed:
            self._new.append("}")
            self.rest, self._unread = self._unread, ""
        if not self.is_done:
            return len(text)
        self.rest = self._unread[: max(0, len(self._unread) - len(text))]  # of the closing, taken with earlier text
        return max(0, len(text) - len(self._unread))

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time."""
        new, self._new = "".join(self._new), []
        return new

    def _step(self) -> bool:
        """Read one part. Returns whether there was a whole one."""
        if self._key is not None:
            return self._read_value()
        self._unread = self._unread.lstrip()
        notation = self._notation
        if self._unread.startswith(notation.end):
            self._unread = self._unread[0 if notation.ends_by_closing else len(notation.end) :]
            self._new.append("}")
            self.is_done = True
            return False
        if found := notation.parameter.match(self._unread):
            self._key, self._unread = found[1], self._unread[found.end() :]
            self._searched = 0
            return True
        self.has_failed = not notation.may_be_next(self._unread)
        return False

    def _read_value(self) -> bool:
        assert self._key is not None
        tags = self._notation.ends_of_value
        ends = [(at, tag) for tag in tags if (at := self._unread.find(tag, self._searched)) >= 0]
        if not ends:
            self._searched = max(0, len(self._unread) - MAX_TAG)
            return False
        end, tag = min(ends)
        value = self._unread[:end].removeprefix("\n").removesuffix("\n")
        if self._key not in self._keys:
            comma = ", " if self._keys else ""
            self._new.append(f"{comma}{json.dumps(self._key)}: {_as_json(value, self._values(self._key))}")
            self._keys.add(self._key)
        # Of a value that nothing closes, what comes next is the end.
        self._unread = self._unread[end + (len(tag) if tag == self._notation.end_of_value else 0) :]
        self._key = None
        return True

    def end(self) -> None:
        """The model ends its answer within the call: what there is of a value is the value, and the call is done."""
        if self._key is not None:
            tags = self._notation.ends_of_value
            begun = [n for tag in tags for n in range(1, len(tag)) if self._unread.endswith(tag[:n])]
            self._unread = self._unread[: len(self._unread) - max(begun, default=0)] + self._notation.end_of_value
            self._read_value()
        self._unread = ""
        self._new.append("}")
        self.is_done = True

    def _values(self, key: str) -> Values:
        schema = self._schemas.get(self.name, {})
        properties = schema.get("properties")
        return Values.of(properties.get(key) if isinstance(properties, Mapping) else None, schema)


def _as_json(value: str, values: Values) -> str:
    """A value as JSON. Only its schema tells text from what else it may be."""
    if (values.are_text or value in values.texts) and not (value == "null" and values.may_be_null):
        return json.dumps(value, ensure_ascii=False)
    if values.may_be_boolean and value.lower() in ("true", "false"):
        return value.lower()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()  # as it is written: numbers keep their digits


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _may_become(text: str, tags: tuple[str, ...], *, has_lines: bool = False) -> bool:
    """Whether ``text``, which has no whole part yet, may be the beginning of one, of lines if ``has_lines``."""
    is_short = len(text) <= MAX_TAG and (has_lines or "\n" not in text)
    return any(tag.startswith(text) or (is_short and text.startswith(tag)) for tag in tags)
