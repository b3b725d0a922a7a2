"""Reads one tool call that is a JSON object, as its text comes."""

from __future__ import annotations

import json

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
ANY = ("type", "id", "index", "call_id")  # what some models write besides
SPACE = " \t\r\n"


class JsonCall:
    """Takes the text of ``{"name": ..., "arguments": {...}}`` in pieces; its first character is the brace.

    ``arguments`` are passed on as they are written, without waiting for their end, once the name is known.

    Attributes:
        name: empty until it is known.
        is_done: the closing brace has been read.
        has_failed: the text is no such call.
        rest: text that was taken and is not part of a call that has failed.
    """

    def __init__(self) -> None:
        self._is_named = False  # only arguments are to be read
        self.name = ""
        self.is_done = False
        self.has_failed = False
        self.rest = ""
        self._raw: list[str] = []
        self._new: list[str] = []  # arguments not taken yet
        self._has_arguments = False
        self._key = ""
        self._value: list[str] = []  # of the key
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._next = "{"  # what is expected: "{", "key", ":", "value", ","; or "in key", "in value"

    @classmethod
    def of(cls, name: str) -> JsonCall:
        """A call of which only the arguments are to be read: their closing brace ends it."""
        call = cls()
        call.name, call._is_named, call._key, call._next = name, True, ARGUMENTS[0], "value"
        return call

    def push(self, text: str) -> int:
        """Take text, up to the name if that is not known yet. Returns how many of its characters belong to the call."""
        count, was_named = 0, bool(self.name)
        while count < len(text) and not self.is_done and bool(self.name) == was_named:
            self._step(text[count])
            if self.has_failed:  # by a character that may be the next marker's
                self._new += [] if self._has_arguments or self._new else ["{}"]
                break
            count += 1
        self._raw.append(text[:count])
        return count

    @property
    def raw(self) -> str:
        """The text of the call so far."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; empty while the name is not known."""
        if not self.name:
            return ""
        new, self._new = "".join(self._new), []
        return new

    def _step(self, character: str) -> None:
        if self._next == "in key":
            self._value.append(character)
            if self._ends_string(character):
                self._key, self._value, self._next = _text("".join(self._value)), [], ":"
                is_repeated = self._has_arguments and self._key in ARGUMENTS
                self.has_failed = is_repeated or not (self.name or self._key in (NAME, *ARGUMENTS, *ANY))
        elif self._next == "in value":
            self._in_value(character)
        elif character in SPACE:
            return
        elif self._next == "value":
            self._begin_value(character)
        elif self._next == "key" and character == '"':
            self._value, self._next = [character], "in key"
        elif self._next in ("key", ",") and character == "}":
            self._end()
        elif self._next == character:
            self._next = {"{": "key", ":": "value", ",": "key"}[character]
        else:
            self.has_failed = True

    def _begin_value(self, character: str) -> None:
        self._value, self._depth, self._in_string = [], 0, False
        self._next = "in value"
        if character in "{[":
            self._depth = 1
        elif character == '"':
            self._in_string = True
        elif character in ",}]:":
            self.has_failed = True
            return
        self._add(character)

    def _in_value(self, character: str) -> None:
        if self._in_string:
            self._add(character)
            if self._ends_string(character):
                self._in_string = False
                if not self._depth:
                    self._end_value()
        elif not self._depth and character in ",}" + SPACE:  # after a number, true, false or null
            self._end_value()
            self._step(character)
        else:
            self._add(character)
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if not self._depth and character in "}]":
                self._end_value()

    def _ends_string(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        else:
            return character == '"'
        return False

    def _add(self, character: str) -> None:
        """A character of a value. Those of an object of arguments are not kept: they have been passed on."""
        if self._key in ARGUMENTS and (self._value or character == "{") and self._value[:1] in ([], ["{"]):
            self._new.append(character)
            self._value = ["{"]
        else:
            self._value.append(character)

    def _end_value(self) -> None:
        self._next = ","
        if self._key == NAME:
            self.name = _text("".join(self._value))
            self.has_failed = not self.name
        elif self._key in ARGUMENTS:
            if not self._has_arguments and self._value != ["{"]:
                self._new.append(_object("".join(self._value)))
            self._has_arguments = True
            self.is_done = self._is_named

    def _end(self) -> None:
        self.is_done = True
        self.has_failed = not self.name
        if not self._has_arguments:
            self._new.append("{}")


def _text(spelled: str) -> str:
    """A JSON string's text; empty if it is none. Halves of surrogate pairs, which UTF-8 cannot spell, are replaced."""
    try:
        text = json.loads(spelled)
    except (ValueError, RecursionError):
        return ""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(text, str) else ""


def _object(spelled: str) -> str:
    """Arguments that are not written as an object: some models write one as a string, or null for none."""
    return _text(spelled) or ("{}" if spelled in ("null", '""') else spelled)
