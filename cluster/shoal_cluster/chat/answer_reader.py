"""Tells an answer's text apart into what is said, the reasoning before it, and tool calls, as the text comes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal_cluster.chat.chat_format import ARGS, END_OF_THINK, PYTHON_TAG, THINK, ChatFormat
from shoal_cluster.chat.json_call import JsonCall
from shoal_cluster.chat.tool import ToolUse
from shoal_cluster.chat.xml_call import HEAD, XmlCall

MAX_HEAD = 200  # characters of ``name[CALL_ID]id[ARGS]``
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:" + re.escape(ARGS) + r")?\s*(?=\{)")
_PART_OF_HEAD = re.compile(r"[\w.\[\]-]+\s*")
_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of the call number ``index`` of an answer. Its first one alone has ``call_id`` and ``name``."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What new text has turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class _Trimmed:
    """Passes text on without the white space at its ends, of which the last is held until more text comes."""

    def __init__(self, *, keeps_start: bool = False) -> None:
        self._space: str | None = "" if keeps_start else None  # None: what comes first goes
        self._before = ""  # comes between what has been said and what follows
        self._new: list[str] = []

    def push(self, text: str) -> None:
        if self._space is None:
            text = text.lstrip()
        if said := text.rstrip():
            self._new.append((self._before if self._space is None else self._space) + said)
            self._space, self._before = text[len(said) :], "\n"
        elif self._space is not None:
            self._space += text

    def part(self) -> None:
        """Something else comes in between: a line ends, instead of the white space before and after it."""
        self._space = None

    def end(self) -> None:
        """Nothing follows: the space that is held belongs to the text."""
        self._new.append(self._space or "")
        self._space = None

    def take(self) -> str:
        new, self._new = "".join(self._new), []
        return new


class AnswerReader:
    """Takes the text of one sequence in pieces, and says what they are. What could still become a marker is held.

    However the text is split, the pieces add up to the same. Text that looks like a call and is none is content.

    Args:
        use: the tools that may be called.
        is_reasoning: the prompt ends within reasoning.
    """

    def __init__(self, chat_format: ChatFormat, use: ToolUse | None, *, is_reasoning: bool = False) -> None:
        self._calls = chat_format.calls
        self._tools = {} if use is None else {tool.name: tool.parameters for tool in use.callable}
        self._is_parallel = use is None or use.parallel
        self._reasons = chat_format.reasons
        self._unread = ""
        self._content = _Trimmed(keeps_start=True)
        self._reasoning = _Trimmed()
        self._pieces: list[CallPiece] = []
        self._call: JsonCall | XmlCall | None = None
        self._is_told = False  # the call's name has been passed on
        self._num_calls = 0
        self._since_opening: str | None = None  # what may be content, until a call has followed the opening
        self._read: Callable[[bool], bool] = self._reason if is_reasoning else self._begin

    @property
    def num_calls(self) -> int:
        """Calls that have been found so far."""
        return self._num_calls

    def push(self, text: str, *, is_last: bool = False) -> AnswerPiece:
        """Take text, with which the answer ends if it is the last."""
        self._unread += text
        while self._read(is_last):  # until what is left is too little to tell
            pass
        if is_last and not self._num_calls:
            self._content.end()
        pieces, self._pieces = tuple(self._pieces), []
        return AnswerPiece(self._content.take(), self._reasoning.take(), pieces)

    # What may come next. Each takes from ``_unread`` and returns whether to go on with the rest.

    def _begin(self, is_last: bool) -> bool:
        """The answer begins: with reasoning, or not."""
        text = self._unread.lstrip()
        if self._reasons and not is_last and THINK.startswith(text):
            return False
        if self._reasons and text.startswith(THINK):
            self._unread = text[len(THINK) :]
            self._read = self._reason
        else:
            self._read = self._begin_content
        return True

    def _reason(self, is_last: bool) -> bool:
        before, marker, rest = self._unread.partition(END_OF_THINK)
        if not marker:
            self._reasoning.push(self._take_before(END_OF_THINK, is_last))
            return False
        self._reasoning.push(before)
        self._unread = rest
        self._content.part()
        self._read = self._begin_content
        return True

    def _begin_content(self, is_last: bool) -> bool:
        """What is said begins, unless it is a call that nothing announces."""
        if not self._tools or self._calls.opening:
            self._read = self._say
            return True
        text = self._unread.lstrip()
        if not is_last and PYTHON_TAG.startswith(text):
            return False
        self._read = self._say
        if text.startswith(("{", "[", PYTHON_TAG)):
            self._since_opening = ""
            self._read = self._between
        return True

    def _say(self, is_last: bool) -> bool:
        opening = self._calls.opening if self._tools else ""
        before, marker, rest = self._unread.partition(opening) if opening else (self._unread, "", "")
        if not marker:
            self._content.push(self._take_before(opening, is_last))
            return False
        self._content.push(before)
        self._unread, self._since_opening = rest, opening
        self._read = self._between
        return True

    def _between(self, is_last: bool) -> bool:
        """Before a call, or after one."""
        is_hermes = bool(self._calls.closing)
        text = self._unread.lstrip(" \t\r\n" if is_hermes else " \t\r\n,;]")
        self._skip(len(self._unread) - len(text))
        markers = tuple(filter(None, (self._calls.opening or PYTHON_TAG, self._calls.closing)))
        if not is_last and any(marker.startswith(text) for marker in (*markers, HEAD)):
            return False
        if (marker := next((marker for marker in markers if text.startswith(marker)), "")) != "":
            self._skip(len(marker))
            if marker == self._calls.closing:
                self._give_up("")
        elif text.startswith("{"):
            self._start(JsonCall())
        elif text.startswith("[") and not is_hermes:
            self._skip(1)
        elif is_hermes and text.startswith(HEAD):
            self._start(XmlCall(self._tools))
        elif self._calls.is_list and (head := _HEAD.match(text)) is not None:
            self._skip(head.end())
            self._start(JsonCall.of(head[1]))
        elif self._calls.is_list and not is_last and len(text) < MAX_HEAD and _PART_OF_HEAD.fullmatch(text):
            return False
        else:
            self._give_up("")
        return True

    def _skip(self, count: int) -> None:
        """Pass over what belongs to calls; it is kept until there is one."""
        if self._since_opening is not None:
            self._since_opening += self._unread[:count]
        self._unread = self._unread[count:]

    def _start(self, call: JsonCall | XmlCall) -> None:
        self._call, self._is_told = call, False
        self._read = self._take_call

    def _take_call(self, is_last: bool) -> bool:
        call = self._call
        assert call is not None
        self._unread = self._unread[call.push(self._unread) :]
        is_bare = not self._calls.opening  # then only the name tells a call from other JSON
        if (not call.name and (call.has_failed or is_last)) or (is_bare and call.name and call.name not in self._tools):
            self._give_up(call.raw)
            return True
        if call.name and not self._is_told:
            self._is_told, self._since_opening = True, None
            self._content.part()
            self._num_calls += 1
            self._tell(CallPiece(self._num_calls - 1, call_id=self._new_id(), name=call.name))
        if arguments := call.take_arguments():
            self._tell(CallPiece(self._num_calls - 1, arguments))
        if call.is_done or call.has_failed:
            self._read = self._between if call.is_done else self._say
            return True
        return False

    def _tell(self, piece: CallPiece) -> None:
        if piece.index and not self._is_parallel:
            return
        if self._pieces and self._pieces[-1].index == piece.index:  # at most one piece of each call at a time
            before = self._pieces.pop()
            piece = replace(before, arguments=before.arguments + piece.arguments)
        self._pieces.append(piece)

    def _give_up(self, raw: str) -> None:
        """No call follows: what looked like one is content."""
        self._content.push((self._since_opening or "") + raw)
        self._since_opening = None
        self._read = self._say

    def _take_before(self, marker: str, is_last: bool) -> str:
        """Take what is unread, but for an end that may be the beginning of ``marker``."""
        text = self._unread
        size = 0 if is_last else next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
        self._unread = text[len(text) - size :]
        return text[: len(text) - size]

    def _new_id(self) -> str:
        if self._calls.id_length is not None:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._calls.id_length))
        return f"call_{secrets.token_hex(12)}"
