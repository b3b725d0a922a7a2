"""A model's chat template: messages in, one prompt text out. The conventions are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal_replica.errors import ConfigError, InvalidArgument


class ChatTemplate:
    """A compiled Jinja template. Templates come with models, so they run in a sandbox.

    Raises:
        ConfigError: ``source`` is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt for the assistant's next turn after ``messages``, which are (role, content).

        Raises:
            InvalidArgument: the template refuses the messages, for instance an order of roles it does not know.
        """
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = [role for role, _ in messages]
            raise InvalidArgument("messages", roles, f"the model's chat template refuses them: {error}") from None


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; when serving, its content is passed through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
