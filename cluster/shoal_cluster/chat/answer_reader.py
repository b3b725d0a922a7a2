"""Tells an answer's text apart into what is said, the reasoning before it, and tool calls, as the text comes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence

from shoal_cluster.chat.answer_pieces import AnswerPiece, CallPiece, Pieces, Trimmed
from shoal_cluster.chat.chat_format import ARGS, CALL_ID, END_OF_THINK, PYTHON_TAG, THINK, ChatFormat
from shoal_cluster.chat.json_call import SPACE, JsonCall
from shoal_cluster.chat.tool import NAME_PATTERN, ToolUse
from shoal_cluster.chat.xml_call import XmlCall

MAX_HEAD = 200  # characters of ``name[CALL_ID]id[ARGS]``
_ID, _ARGS = rf"{re.escape(CALL_ID)}[\w-]{{1,32}}", re.escape(ARGS)
_HEAD = re.compile(rf"(?P<name>{NAME_PATTERN})(?:{_ID})?(?P<args>{_ARGS})?\s{{0,8}}(?=\{{)")
_PART_OF_HEAD = re.compile(r"[\w.\[\]-]+\s*")
_ID_CHARACTERS = string.ascii_letters + string.digits


class AnswerReader:
    """Takes the text of one sequence in pieces, and says what they are. What could still become a marker is held.

    However the text is split, the pieces add up to the same. Text that looks like a call and is none is content; of a
    call that breaks off after its name, what comes before the next marker is dropped.

    Args:
        use: the tools that may be called.
        is_reasoning: the prompt ends within reasoning.
        is_json: an answer that does not call is JSON, and none such is taken for a call.
    """

    def __init__(
        self, chat_format: ChatFormat, use: ToolUse | None, *, is_reasoning: bool = False, is_json: bool = False
    ) -> None:
        self._calls = chat_format.calls
        self._tools = {} if use is None else {tool.name: tool.parameters for tool in use.callable}
        self._openings = chat_format.calls.openings if self._tools else ()
        self._is_parallel = chat_format.parallel and (use is None or use.parallel)
        self._reasons = chat_format.reasons
        if is_json:  # whose strings may have anything in them
            self._first_only = self._openings or (PYTHON_TAG,)
        else:
            self._first_only = () if self._openings else ("{", "[", PYTHON_TAG)
        self._unread = ""
        self._pieces = Pieces()
        self._content = Trimmed(self._pieces.say, keeps_start=True)
        self._reasoning = Trimmed(self._pieces.think)
        self._call: JsonCall | XmlCall | None = None
        self._is_told = False  # the call's name has been passed on
        self._is_cut = False
        self._num_calls = 0
        self._since_opening: str | None = None  # what may be content, until a call has followed the opening
        self._read: Callable[[bool], bool] = self._begin_reasoning if is_reasoning else self._begin
        self._length = 0  # of all text so far, in characters
        self._thought: tuple[int, int | None] | None = (0, None) if is_reasoning else None  # where reasoning is in it

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next belongs to reasoning, as far as is known."""
        return self._read in (self._begin_reasoning, self._reason)

    @property
    def num_thought(self) -> int:
        """Characters of reasoning so far, its markers included."""
        if self._thought is None:
            return 0
        start, end = self._thought
        return (self._length if end is None else end) - start

    def push(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> tuple[AnswerPiece, ...]:
        """Take text, with which the answer ends if it is the last; ``is_cut`` if the model had not ended it. Returns
        what it has turned out to be, in order.
        """
        self._is_cut = is_cut
        self._unread += text
        self._length += len(text)
        while self._read(is_last):  # until what is left is too little to tell
            pass
        if is_last and not self._num_calls:
            self._content.end()
        return self._pieces.take()

    # What may come next. Each takes from ``_unread`` and returns whether to go on with the rest.

    def _begin(self, is_last: bool) -> bool:
        """The answer begins: with reasoning, or not."""
        text = self._unread.lstrip(SPACE)
        if self._reasons and text.startswith(THINK):
            self._thought = self._length - len(text), None
            self._read = self._begin_reasoning
            return True
        if self._reasons and not is_last and THINK.startswith(text):
            if not text:
                self._content.push(self._unread)
                self._unread = ""
            return False
        self._read = self._begin_content
        return True

    def _begin_reasoning(self, is_last: bool) -> bool:
        """Reasoning begins, with its marker or behind that of the prompt."""
        self._unread = self._unread.lstrip(SPACE)
        if not is_last and THINK.startswith(self._unread):
            return False
        self._unread = self._unread.removeprefix(THINK)
        self._content.part()
        self._read = self._reason
        return True

    def _reason(self, is_last: bool) -> bool:
        before, marker, rest = self._unread.partition(END_OF_THINK)
        if not marker:
            self._reasoning.push(self._take_before((END_OF_THINK,), is_last))
            return False
        self._reasoning.push(before)
        if self._thought is not None:
            self._thought = self._thought[0], self._length - len(rest)
        self._unread = rest
        self._read = self._begin_content
        return True

    def _begin_content(self, is_last: bool) -> bool:
        """What is said begins, or calls that may only come first."""
        self._read = self._say
        if not self._tools or not self._first_only:
            return True
        text = self._unread.lstrip(SPACE)
        if text.startswith(self._first_only):
            self._since_opening = ""
            self._read = self._between
        elif not is_last and any(opening.startswith(text) for opening in self._first_only):
            self._read = self._begin_content
            if not text:
                self._content.push(self._unread)
                self._unread = ""
            return False
        else:
            self._openings = ()
        return True

    def _say(self, is_last: bool) -> bool:
        place, opening = self._first(self._openings)
        if not opening:
            self._content.push(self._take_before(self._openings, is_last))
            return False
        self._content.push(self._unread[:place])
        self._unread, self._since_opening = self._unread[place:], ""
        if opening == self._calls.opening:
            self._skip(len(opening))
        self._read = self._between
        return True

    def _between(self, is_last: bool) -> bool:
        """Before a call, or after one."""
        is_tagged = bool(self._calls.closing)
        odd = "" if is_tagged and self._since_opening is not None else "}]" if is_tagged else ",;]"
        text = self._unread.lstrip(SPACE + odd)
        self._skip(len(self._unread) - len(text))
        opening, closing = self._calls.opening or PYTHON_TAG, self._calls.closing
        markers = tuple(filter(None, (opening, closing)))
        if not is_last and any(marker.startswith(text) for marker in (*markers, self._calls.xml.head_start)):
            return False
        if text.startswith(opening):
            self._keep(len(opening))
        elif closing and text.startswith(closing):
            self._skip(len(closing))
            self._give_up()
        elif text.startswith("{"):
            self._start(JsonCall())
        elif text.startswith("[") and not is_tagged:
            self._keep(1)
        elif is_tagged and self._is_xml_head(text):
            return self._begin_xml(text, is_last)
        elif self._calls.is_list and (head := _HEAD.match(text)) is not None and self._is_head(head):
            self._skip(head.end())
            self._start(JsonCall.of(head["name"]))
        elif self._calls.is_list and not is_last and len(text) < MAX_HEAD and _PART_OF_HEAD.fullmatch(text):
            return False
        else:
            self._give_up()
        return True

    @property
    def _is_announced(self) -> bool:
        """Whether the opening of calls is what has come just before."""
        return (self._since_opening or "").rstrip(SPACE).endswith(self._calls.opening)

    def _is_xml_head(self, text: str) -> bool:
        """Whether a tagged call may begin with ``text``: by its tag, or, if it has none, right after the opening."""
        notation = self._calls.xml
        return text.startswith(notation.head_start) if notation.head_start else self._is_announced

    def _begin_xml(self, text: str, is_last: bool) -> bool:
        """A tagged call begins, unless nothing has announced it and it is no tool's: then it is only spoken of."""
        notation = self._calls.xml
        found = notation.head.match(text)
        if found is None and not is_last and notation.may_be_head(text):
            return False
        if found is not None and (found[1] in self._tools or self._since_opening is None or self._is_announced):
            self._skip(found.end())
            self._start(XmlCall(notation, found[1], self._tools))
        else:
            self._keep(len(notation.head_start))
            self._give_up()
        return True

    def _is_head(self, head: re.Match[str]) -> bool:
        """Whether it begins a call: it says so, or it is a tool's name right after the opening."""
        return bool(head["args"]) or (self._is_announced and head["name"] in self._tools)

    def _skip(self, count: int) -> None:
        """Pass over what belongs to calls; after an opening it is kept until there is one."""
        if self._since_opening is not None:
            self._keep(count)
        else:
            self._unread = self._unread[count:]

    def _keep(self, count: int) -> None:
        """Pass over what is content unless a call follows."""
        self._since_opening = (self._since_opening or "") + self._unread[:count]
        self._unread = self._unread[count:]

    def _start(self, call: JsonCall | XmlCall) -> None:
        self._call, self._is_told = call, False
        self._read = self._take_call

    def _take_call(self, is_last: bool) -> bool:
        call = self._call
        assert call is not None
        self._unread = self._unread[call.push(self._unread) :]
        if isinstance(call, JsonCall) and not self._may_be_call(call, is_last):
            self._give_up(call.raw)
            return True
        if call.name and not self._is_told:
            self._is_told, self._since_opening = True, None
            self._content.part()
            self._num_calls += 1
            self._tell(CallPiece(self._num_calls - 1, call_id=self._new_id(), name=call.name))
        if is_last and not (self._is_cut or call.is_done or call.has_failed) and isinstance(call, XmlCall):
            call.end()
        if arguments := call.take_arguments():
            self._tell(CallPiece(self._num_calls - 1, arguments))
        if call.is_done or call.has_failed:
            self._unread = call.rest + self._unread
            self._read = self._between if call.is_done else self._resume
            return True
        return bool(self._unread)

    def _resume(self, is_last: bool) -> bool:
        """After a call that has broken off: go on at the next marker."""
        place, marker = self._first((*self._openings, self._calls.closing) if self._calls.closing else self._openings)
        if not marker:
            self._take_before((*self._openings, self._calls.closing), is_last)
            return False
        self._unread = self._unread[place:]
        self._read = self._between
        return True

    def _may_be_call(self, call: JsonCall, is_last: bool) -> bool:
        """Whether it is one, by its name. Where nothing else tells it from other JSON, that has to be a tool's."""
        if not call.name:
            return not (call.has_failed or is_last)
        return call.name in self._tools or (bool(self._openings) and bool(re.fullmatch(NAME_PATTERN, call.name)))

    def _tell(self, piece: CallPiece) -> None:
        if self._is_parallel or piece.index == 0:
            self._pieces.call(piece)

    def _give_up(self, raw: str = "") -> None:
        """No call follows: what looked like one is content."""
        self._content.push((self._since_opening or "") + raw)
        self._since_opening = None
        self._read = self._say

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """The first of ``markers`` in what is unread, and its place; an empty text if there is none."""
        found = [(place, marker) for marker in markers if (place := self._unread.find(marker)) >= 0]
        return min(found, default=(0, ""))

    def _take_before(self, markers: Sequence[str], is_last: bool) -> str:
        """Take what is unread, but for an end that may be the beginning of a marker."""
        text, size = self._unread, 0
        if not is_last:
            ends = (n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n]))
            size = max(ends, default=0)
        self._unread = text[len(text) - size :]
        return text[: len(text) - size]

    def _new_id(self) -> str:
        if self._calls.id_length is not None:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._calls.id_length))
        return f"call_{secrets.token_hex(12)}"
