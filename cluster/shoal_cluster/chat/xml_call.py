"""Reads one tool call in the notation of Qwen3-Coder, as its text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HEAD = "<function="
_HEAD = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
END_OF_PARAMETER, END = "</parameter>", "</function>"


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
        self._schemas = schemas
        self._unread = ""
        self._key: str | None = None
        self._searched = 0  # characters of ``_unread`` in which a parameter does not end
        self._num_arguments = 0
        self._new: list[str] = []

    def push(self, text: str) -> int:
        """Take text. Returns how many of its characters belong to the call."""
        if not self.name:
            self.raw += text
        self._unread += text
        while self._step():
            pass
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
        self.has_failed = not _may_become(self._unread, ("<parameter=", END))
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
        end = self._unread.find(END_OF_PARAMETER, self._searched)
        if end < 0:
            self._searched = max(0, len(self._unread) - len(END_OF_PARAMETER))
            return False
        value = self._unread[:end].removeprefix("\n").removesuffix("\n")
        comma = ", " if self._num_arguments else ""
        self._new.append(f"{comma}{json.dumps(self._key)}: {self._as_json(self._key, value)}")
        self._unread, self._key = self._unread[end + len(END_OF_PARAMETER) :], None
        self._num_arguments += 1
        return True

    def _as_json(self, key: str, value: str) -> str:
        schema = self._schemas.get(self.name, {}).get("properties", {}).get(key, {})
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(value, ensure_ascii=False)


def _may_become(text: str, tags: tuple[str, ...]) -> bool:
    """Whether ``text``, which has no whole part yet, may be the beginning of one."""
    return any(tag.startswith(text) or (text.startswith(tag) and "\n" not in text) for tag in tags)
