"""A model's chats: the prompt that messages become, what the answer must match, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from shoal_cluster.chat.answer_grammar import answer_grammar
from shoal_cluster.chat.answer_reader import AnswerReader
from shoal_cluster.chat.chat_format import END_OF_THINK, THINK, ChatFormat
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import MAX_DEPTH, REQUIRED, ToolUse, is_deep, json_text
from shoal_cluster.chat.tool_prompt import SYSTEM, USER, turns_with_tools
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.structured_output import FIELD, JSON_SCHEMA, StructuredOutput
from shoal_replica.tokenizer import Tokenizer

DEVELOPER = "developer"  # OpenAI's newer name of the system, which few templates know
ASSISTANT = "assistant"


class Forms(Protocol):
    """What is asked of the library that enforces forms."""

    def check(self, structure: StructuredOutput) -> None: ...

    def is_special(self, token_id: int, text: str) -> bool: ...


class Chats:
    """For one model. Any thread may call its methods."""

    def __init__(self, tokenizer: Tokenizer, forms: Forms) -> None:
        self._tokenizer = tokenizer
        self._forms = forms
        self._format = ChatFormat.of(tokenizer.chat_template)
        self._special_ids: dict[str, int | None] = {}  # of markers
        template = tokenizer.chat_template
        self._knows_developers = template is not None and DEVELOPER in template.source

    def prompt(
        self,
        messages: Sequence[Message],
        use: ToolUse | None = None,
        options: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The text that the model goes on after. Raises InvalidArgument as ``Tokenizer.apply_chat_template`` does."""
        json_text("template_options", dict(options or {}))
        tools = () if use is None or not use.callable else use.tools
        if not self._knows_developers:
            messages = [replace(m, role=SYSTEM) if m.role == DEVELOPER else m for m in messages]
        if self._format.takes_tools:
            turns = [message.turn() for message in messages]
            if any(is_deep(turn.get("tool_calls")) for turn in turns):
                raise InvalidArgument("messages", "tool_calls", f"arguments must be nested at most {MAX_DEPTH} times")
            return self._tokenizer.apply_chat_template(turns, [tool.definition() for tool in tools], options, end)
        turns = turns_with_tools(messages, tools, takes_system=not tools or self._takes_system)
        return self._tokenizer.apply_chat_template(turns, (), options, end)

    def is_reasoning(self, prompt: str, messages: Sequence[Message], end: PromptEnd) -> bool:
        """Whether the text after the prompt of these messages begins with reasoning: because the template has begun it,
        or the message that is continued.
        """
        if not self._format.reasons or end is PromptEnd.CLOSED:
            return False
        if end is PromptEnd.ANSWER:
            return prompt.rstrip().endswith(THINK)
        said = messages[-1].content if messages[-1].role == ASSISTANT else ""
        return said.rfind(THINK) > said.rfind(END_OF_THINK)

    def structure(
        self, use: ToolUse | None, answer: StructuredOutput | None, *, is_reasoning: bool = False
    ) -> StructuredOutput | None:
        """What the text after a prompt must match, if it must be ``answer`` where it does not call tools. It may begin
        with reasoning.

        Raises:
            InvalidArgument: a tool's schema is not supported, or ``answer`` cannot be had together with tools.
        """
        told = answer if _may_answer(use) else None
        try:
            structure = self._grammar(use, told, is_reasoning=is_reasoning)
            if structure is not None and structure is not answer:
                self._forms.check(structure)
        except InvalidArgument as error:
            if use is None or not use.callable or error.field != FIELD:
                raise
            raise self._blame(use, error) from None
        return structure

    def reader(
        self, use: ToolUse | None, answer: StructuredOutput | None, *, is_reasoning: bool = False
    ) -> AnswerReader | None:
        """A reader for one sequence, which may begin with reasoning; None if its text is all content."""
        has_reasoning = self._format.reasons and (answer is None or answer.kind == JSON_SCHEMA)
        if not (_has_tools(use) or has_reasoning):
            return None
        return AnswerReader(
            self._format, use, is_reasoning=is_reasoning, is_json=answer is not None and _may_answer(use)
        )

    def shown(self, use: ToolUse | None) -> frozenset[int]:
        """Special tokens that are part of an answer's text."""
        markers = (THINK, END_OF_THINK) if self._format.reasons else ()
        return self._tokenizer.special_ids((*markers, *(self._format.call_markers if _has_tools(use) else ())))

    def _grammar(
        self, use: ToolUse | None, answer: StructuredOutput | None, *, is_reasoning: bool = False
    ) -> StructuredOutput | None:
        return answer_grammar(self._format, use, self._special_id, answer=answer, is_reasoning=is_reasoning)

    def _blame(self, use: ToolUse, error: InvalidArgument) -> InvalidArgument:
        """The error that names the first tool which alone would be refused, or all if it takes several."""
        for tool in use.callable:
            try:
                structure = self._grammar(replace(use, tools=(tool,)), None)
                if structure is not None:
                    self._forms.check(structure)
            except InvalidArgument as alone:
                return InvalidArgument("tools", tool.name, alone.limit)
        return InvalidArgument("tools", f"{len(use.callable)} tools", error.limit)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template knows system turns."""
        turns = [Message(SYSTEM, "a").turn(), Message(USER, "a").turn()]
        try:
            self._tokenizer.apply_chat_template(turns)
        except InvalidArgument:
            return False
        return True

    def _special_id(self, text: str) -> int | None:
        if text not in self._special_ids:  # half a millisecond's work; there are few markers
            token_id = self._tokenizer.token_id(text)
            is_special = token_id is not None and self._forms.is_special(token_id, text)
            self._special_ids[text] = token_id if is_special else None
        return self._special_ids[text]


def _has_tools(use: ToolUse | None) -> bool:
    return use is not None and bool(use.callable)


def _may_answer(use: ToolUse | None) -> bool:
    """Whether the model need not call."""
    return use is None or use.mode != REQUIRED
