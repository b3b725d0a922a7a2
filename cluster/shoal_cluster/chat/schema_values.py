"""What a JSON schema says of one value, as far as text written without quotes can be told from other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 8  # of alternatives and references within each other

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Values:
    """The union of all alternatives (``anyOf``, ``oneOf``, ``allOf``, a list of types, a reference).

    Attributes:
        types: the names of the types that a value may have; of constants those of null and booleans alone.
        texts: texts that it may be, where the schema lists them.
    """

    types: frozenset[str] = _NOTHING
    texts: frozenset[str] = _NOTHING

    @property
    def are_text(self) -> bool:
        """Whether any text will do."""
        return "string" in self.types

    @property
    def may_be_null(self) -> bool:
        return "null" in self.types

    @property
    def may_be_boolean(self) -> bool:
        return "boolean" in self.types

    @classmethod
    def of(cls, schema: object, root: Mapping[str, Any], depth: int = 0) -> Values:
        """Read ``schema``, within ``root``, whose definitions it may refer to. What cannot be read says nothing."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return cls()
        constants = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        if constants:
            kinds = ("null" if each is None else "boolean" for each in constants if isinstance(each, bool | None))
            return cls(frozenset(kinds), frozenset(each for each in constants if isinstance(each, str)))
        kind = schema.get("type")
        named = [kind] if isinstance(kind, str) else _listed(kind)
        alternatives = [each for key in ("anyOf", "oneOf", "allOf") for each in _listed(schema.get(key))]
        if "$ref" in schema:
            alternatives.append(_referred(schema["$ref"], root))
        parts = [cls.of(each, root, depth + 1) for each in alternatives]
        types = frozenset(each for each in named if isinstance(each, str))
        return cls(types.union(*(part.types for part in parts)), _NOTHING.union(*(part.texts for part in parts)))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference within the same schema, like ``#/$defs/City``, stands for; None if there is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
