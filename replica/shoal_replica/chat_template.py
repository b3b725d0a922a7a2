"""A model's chat template: messages in, one prompt text out. The conventions are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal_replica.errors import ConfigError, InvalidArgument

Turn = Mapping[str, Any]
"""A message as templates read it: ``role``, ``content``, and what a turn with tools has besides."""


class PromptEnd(StrEnum):
    """How the prompt of a chat ends."""

    ANSWER = "answer"  # with the beginning of the assistant's turn
    CLOSED = "closed"  # with the end of the last message
    CONTINUED = "continued"  # within the last message, which the model goes on with


MAX_LENGTH = 2**25  # characters of a prompt
MAX_INDENT = 8
CONTINUED_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put at the end of a message that is continued, to find the place; some templates strip the space."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"})
"""Variables of a template that are not a client's to set."""


class ChatTemplate:
    """A compiled Jinja template. Templates come with models, so they run in a sandbox.

    Args:
        for_tools: the template where there are tools, if the model has one of its own for that.

    Raises:
        ConfigError: ``source`` is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], for_tools: str | None = None) -> None:
        self.source = source if for_tools is None else for_tools
        self._special_tokens = special_tokens
        self._template = _compile(source)
        self._for_tools = self._template if for_tools is None else _compile(for_tools)
        self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(self.source))

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The prompt for the assistant's next turn after ``messages``, or as ``end`` says.

        Args:
            tools: definitions of the tools that the model may call, as OpenAI's API has them.
            options: the template's own variables, such as ``enable_thinking``.

        Raises:
            InvalidArgument: the template refuses the messages, for instance an order of roles it does not know; an
                option is not a client's to set; or there is no last message to continue.
        """
        try:
            end = PromptEnd(end)
        except ValueError:
            raise InvalidArgument("end", end, f"must be one of {', '.join(PromptEnd)}") from None
        if end is PromptEnd.CONTINUED:
            messages = _marked(messages)
        if reserved := RESERVED & (options or {}).keys():
            raise InvalidArgument("template_options", sorted(reserved), "cannot be set by a request")
        template = self._for_tools if tools else self._template
        given = {"documents": None, **(options or {}), **self._special_tokens}
        given["add_generation_prompt"] = end is PromptEnd.ANSWER
        given["messages"] = [dict(turn) for turn in messages]
        given["tools"] = [dict(tool) for tool in tools] or None
        parts, length = [], 0
        try:
            for part in template.generate(given):
                parts.append(part)
                length += len(part)
                if length > MAX_LENGTH:
                    raise ValueError(f"it makes more than {MAX_LENGTH} characters of them")
        except MemoryError:
            raise
        except Exception as error:  # whatever a template does with what it is given
            roles = [turn.get("role") for turn in messages]
            raise InvalidArgument("messages", roles, f"the model's chat template refuses them: {error}") from None
        text = "".join(parts)
        return _cut(text) if end is PromptEnd.CONTINUED else text


def _marked(messages: Sequence[Turn]) -> list[Turn]:
    """The messages, of which the last ends with a mark."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidArgument("continue_final_message", True, "the last message has no text to go on with")
    return [*messages[:-1], {**messages[-1], "content": content + CONTINUED_HERE}]


def _cut(text: str) -> str:
    """``text`` up to the mark; where the template strips what it is given, also without the spaces before."""
    place = text.rfind(CONTINUED_HERE.strip())
    if place < 0:
        limit = "the model's chat template does not show the last message as it is"
        raise InvalidArgument("continue_final_message", True, limit)
    return text[:place] if text.startswith(CONTINUED_HERE, place) else text[:place].rstrip()


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; when serving, its content is passed through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which would escape HTML characters."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise ValueError(f"indent: must be at most {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
