"""What a JSON schema says of one value, as far as text written without quotes can be told from other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    def of(cls, schema: object, root: Mapping[str, Any]) -> Values:
        """Read ``schema``, within ``root``, whose definitions it may refer to. What cannot be read says nothing."""
        types: set[str] = set()
        texts: set[str] = set()
        seen: set[int] = set()  # a schema may refer to itself
        left = [schema]
        while left:
            part = left.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            constants = [*_listed(part.get("enum")), *([part["const"]] if "const" in part else [])]
            if constants:
                types.update(
                    "null" if each is None else "boolean" for each in constants if isinstance(each, bool | None)
                )
                texts.update(each for each in constants if isinstance(each, str))
                continue
            kind = part.get("type")
            named = [kind] if isinstance(kind, str) else _listed(kind)
            types.update(each for each in named if isinstance(each, str))
            left += [each for key in ("anyOf", "oneOf", "allOf") for each in _listed(part.get(key))]
            if "$ref" in part:
                left.append(_referred(part["$ref"], root))
        return cls(frozenset(types), frozenset(texts))


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
