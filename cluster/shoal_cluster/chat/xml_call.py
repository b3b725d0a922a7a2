"""Reads one tool call in the notation of Qwen3-Coder, as its text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HEAD = "<function="
_HEAD = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
PARAMETER, END_OF_PARAMETER, END = "<parameter=", "</parameter>", "</function>"
_ENDS_OF_VALUE = (END_OF_PARAMETER, f"\n{PARAMETER}", f"\n{END}")
MAX_TAG = 200  # characters of a tag with its name


class XmlCall:
    """Takes the text of ``<function=NAME>``, ``<parameter=KEY>VALUE</parameter>`` ..., ``</function>`` in pieces. The
    attributes are those of JsonCall. Arguments come parameter by parameter.

    Args:
        schemas: by the name of a tool, the JSON schema of its arguments: only a type tells text from numbers.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name = ""
        self.raw = ""  # as long as the name is not known
        self.is_done = False
        self.has_failed = False
        self.rest = ""
        self._schemas = schemas
        self._unread = ""
        self._key: str | None = None
        self._searched = 0  # characters of ``_unread`` in which a parameter does not end
        self._keys: set[str] = set()
        self._new: list[str] = []

    def push(self, text: str) -> int:
        """Take text. Returns how many of its characters belong to the call."""
        if not self.name:
            self.raw += text
        self._unread += text
        while self._step():
            pass
        if self.has_failed:
            self._new += ["}"] if self.name else []
            self.rest, self._unread = self._unread, ""
        return max(0, len(text) - len(self._unread)) if self.is_done else len(text)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; empty while the name is not known."""
        new, self._new = "".join(self._new), []
        return new

    def _step(self) -> bool:
        """Read one part. Returns whether there was a whole one."""
        if not self.name:
            return self._read_head()
        if self._key is not None:
            return self._read_value()
        self._unread = self._unread.lstrip()
        if self._unread.startswith(END):
            self._unread = self._unread[len(END) :]
            self._new.append("}")
            self.is_done = True
            return False
        if found := _PARAMETER.match(self._unread):
            self._key, self._unread = found[1], self._unread[found.end() :]
            self._searched = 0
            return True
        self.has_failed = not _may_become(self._unread, (PARAMETER, END))
        return False

    def _read_head(self) -> bool:
        found = _HEAD.match(self._unread)
        if found is None:
            self.has_failed = not _may_become(self._unread, (HEAD,))
            return False
        self.name, self._unread = found[1], self._unread[found.end() :]
        self._new.append("{")
        return True

    def _read_value(self) -> bool:
        assert self._key is not None
        ends = [(at, tag) for tag in _ENDS_OF_VALUE if (at := self._unread.find(tag, self._searched)) >= 0]
        if not ends:
            self._searched = max(0, len(self._unread) - MAX_TAG)
            return False
        end, tag = min(ends)
        value = self._unread[:end].removeprefix("\n").removesuffix("\n")
        if self._key not in self._keys:
            comma = ", " if self._keys else ""
            self._new.append(f"{comma}{json.dumps(self._key)}: {_as_json(value, self._schema(self._key))}")
            self._keys.add(self._key)
        # Of a value that nothing closes, what comes next is the end.
        self._unread = self._unread[end + (len(tag) if tag == END_OF_PARAMETER else 0) :]
        self._key = None
        return True

    def _schema(self, key: str) -> Mapping[str, Any]:
        properties = self._schemas.get(self.name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}


def _as_json(value: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON. Only its schema tells text from what else it may be."""
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    options = schema.get("enum")
    is_text = value in options if isinstance(options, list) else "string" in types
    if is_text and not (value == "null" and "null" in types):
        return json.dumps(value, ensure_ascii=False)
    if types == {"boolean"} and value.lower() in ("true", "false"):
        return value.lower()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()  # as it is written: numbers keep their digits


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _may_become(text: str, tags: tuple[str, ...]) -> bool:
    """Whether ``text``, which has no whole part yet, may be the beginning of one."""
    is_short = len(text) <= MAX_TAG and "\n" not in text
    return any(tag.startswith(text) or (is_short and text.startswith(tag)) for tag in tags)
