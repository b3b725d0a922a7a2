"""What the text of an answer has turned out to be, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal_cluster.chat.json_call import SPACE


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of the call number ``index`` of an answer. Its first one alone has ``call_id`` and ``name``."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What new text has turned out to be: reasoning, then content, then calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class Pieces:
    """What has been told since the last time, in the order in which it was told."""

    def __init__(self) -> None:
        self._done: list[AnswerPiece] = []
        self._content = self._reasoning = ""
        self._calls: list[CallPiece] = []

    def say(self, text: str) -> None:
        if self._calls:
            self._close()
        self._content += text

    def think(self, text: str) -> None:
        if self._calls or self._content:
            self._close()
        self._reasoning += text

    def call(self, piece: CallPiece) -> None:
        if self._calls and self._calls[-1].index == piece.index:  # at most one piece of each call at a time
            before = self._calls.pop()
            piece = replace(before, arguments=before.arguments + piece.arguments)
        self._calls.append(piece)

    def take(self) -> tuple[AnswerPiece, ...]:
        self._close()
        done, self._done = tuple(self._done), []
        return done

    def _close(self) -> None:
        if self._content or self._reasoning or self._calls:
            self._done.append(AnswerPiece(self._content, self._reasoning, tuple(self._calls)))
        self._content, self._reasoning, self._calls = "", "", []


class Trimmed:
    """Passes text on without the white space at its ends, of which the last is held until more text comes."""

    def __init__(self, tell: Callable[[str], None], *, keeps_start: bool = False) -> None:
        self._tell = tell
        self._space: list[str] | None = [] if keeps_start else None  # None: what comes first goes
        self._before = ""  # comes between what has been said and what follows

    def push(self, text: str) -> None:
        if self._space is None:
            text = text.lstrip(SPACE)
        if said := text.rstrip(SPACE):
            self._tell((self._before if self._space is None else "".join(self._space)) + said)
            self._space, self._before = [text[len(said) :]], "\n"
        elif self._space is not None:
            self._space.append(text)

    def part(self) -> None:
        """A call or reasoning interrupts the text: white space around it is dropped, and a newline joins the parts."""
        self._space = None

    def end(self) -> None:
        """Nothing follows: the space that is held belongs to the text."""
        if self._space:
            self._tell("".join(self._space))
        self._space = None
