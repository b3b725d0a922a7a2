"""What an answer must match: a JSON schema, a regular expression, or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal_replica.errors import InvalidArgument
from shoal_replica.field_checks import check_unicode

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"
KINDS = (JSON_SCHEMA, REGEX, LARK)
MAX_SOURCE_LENGTH = 65_536
FIELD = "structured_output"
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of JSON at most so much white space, in which small models would otherwise lose themselves."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer, in the words of llguidance, which enforces it token by token. Raises InvalidArgument for a
    kind that is not one of KINDS, or a source that is empty or too long; ``Grammars.check`` finds what is wrong in it.

    Attributes:
        source: a JSON schema as text, a regular expression (Rust's), or a context-free grammar in Lark's notation,
            of at most 1000 lines.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"{FIELD}.kind", self.kind, f"must be one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE_LENGTH:
            given = f"{len(self.source)} characters" if isinstance(self.source, str) else self.source
            raise InvalidArgument(FIELD, given, f"must be text of 1 to {MAX_SOURCE_LENGTH} characters")
        check_unicode(FIELD, self.source)

    @classmethod
    def json_schema(cls, schema: Any) -> StructuredOutput:
        """JSON that matches ``schema``: a dict, or text."""
        if isinstance(schema, str):
            return cls(JSON_SCHEMA, schema)
        try:
            return cls(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(FIELD, type(schema).__name__, f"cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, options: Sequence[str]) -> StructuredOutput:
        """Exactly one of ``options``."""
        if not options or not all(isinstance(option, str) and option for option in options):
            raise InvalidArgument(FIELD, options, "must be a list of texts that are not empty")
        return cls(REGEX, "|".join(re.escape(option) for option in options))
