"""What the fields of bodies have in common: strict types, null as absent, and refusals that name the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from starlette.exceptions import HTTPException

from shoal_cluster.serve.call import MAX_ENTRIES
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_defaults import DEFAULTED
from shoal_replica.sampling_params import MAX_SEED

LEAST_TOP_P = 1e-9


def unicode_text(text: str) -> str:
    """Refuses lone surrogates, which JSON's escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without lone surrogates") from None
    return text


def instead_of_null(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


def _words(served: tuple[Any, ...]) -> str:
    return f"only {' and '.join(map(repr, served))} can be asked for" if served else "is not supported; leave it out"


def only(*served: Any) -> AfterValidator:
    """Accepts only the ``served`` values of a field; null counts as absent."""

    def check(value: Any) -> Any:
        if value is not None and value not in served:
            raise ValueError(_words(served))
        return value

    return AfterValidator(check)


def _left_out(value: Any) -> Any:
    if value:
        raise ValueError("is not supported; leave it out")
    return value


def at_most(count: int) -> BeforeValidator:
    """Refuses larger dictionaries and lists before their entries are looked at: each may have an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; must have at most {count}")
        return value

    return BeforeValidator(check)


def _entries_of(value: Any) -> list[Any]:
    """Its objects and lists. There may be millions of others, so this is written for speed."""
    inner = value.values() if type(value) is dict else value
    return [each for each in inner if type(each) is dict or type(each) is list]


class _FirstError(FailFast):
    __hash__ = object.__hash__  # unions of types need one


T = TypeVar("T")
ListOf = Annotated[list[T], _FirstError()]  # else each of a million elements may have an error, which takes seconds
Unsupported = Annotated[Any, AfterValidator(_left_out)]
Text = Annotated[str, AfterValidator(unicode_text)]
Name = Annotated[str, Field(min_length=1), AfterValidator(unicode_text)]
TextOrNull = Annotated[Text, instead_of_null("")]
TemplateOptions = Annotated[dict[Text, Any], at_most(256)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class WholeBody(Body):
    """All that a request sends, which has at most ``MAX_ENTRIES`` objects and lists, at any depth."""

    @model_validator(mode="before")
    @classmethod
    def _has_few_entries(cls, body: Any) -> Any:
        layer, count = [body] if isinstance(body, dict) else [], 0
        while layer:
            count += len(layer)
            if count > MAX_ENTRIES:
                raise HTTPException(413, f"body: must have at most {MAX_ENTRIES} objects and lists")
            layer = [each for one in layer for each in _entries_of(one)]
        return body


class TextPart(Body):
    """One part of a content."""

    type: Text
    text: Text = ""
    refusal: Text = ""

    @property
    def said(self) -> str:
        return self.text or self.refusal


WORDS = {"template_options": "chat_template_kwargs"}
"""Fields of calls, as all bodies have them."""


def renamed(error: Exception, words: Mapping[str, str]) -> Exception:
    """``error`` with the field that a body has for it, by the field's name in calls: ``WORDS``, and ``words``."""
    if isinstance(error, InvalidArgument) and (word := words.get(error.field) or WORDS.get(error.field)):
        return error.renamed(word)
    return error


def left_out(body: BaseModel) -> frozenset[str]:
    """The parameters that ``body`` leaves to the model's recommendation; see GenerateCall."""
    return frozenset(name for name in DEFAULTED if getattr(body, name, None) is None)


def top_p_of(value: float | None) -> float | None:
    """As SamplingParams has it. 0, which leaves the likeliest token alone, is less than that of any token."""
    return LEAST_TOP_P if value == 0 else value


def seed_of(value: int | None) -> int | None:
    """As SamplingParams has it. OpenAI's and vLLM's have a sign and 64 bits; -1 is vLLM's word for any seed."""
    if value is None or value == -1:
        return None
    return value & MAX_SEED if -MAX_SEED - 1 <= value < 0 else value


def effort_options(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates for a reasoning effort; whether to reason at all has two names among models."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False, "thinking": False} if effort == "none" else {})


def text_of(where: str, content: str | Sequence[TextPart] | None, served: Collection[str] = ("text",)) -> str:
    """A content's text, each part on lines of its own. Raises InvalidArgument, the field being ``where``, for parts of
    other kinds than ``served``.
    """
    if content is None:
        raise InvalidArgument(where, None, "must be a string or a list of parts")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in served:
            raise InvalidArgument(where, part.type, "only parts of text are served")
    return "\n".join(part.said for part in content)
