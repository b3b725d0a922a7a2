"""What the form of an answer may ask of llguidance, which does not limit that itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_MULTIPLES = 10_000  # product of a schema's `multipleOf`: it has a state for each remainder
# Of rules and groups, and of a schema's levels: the library goes down a chain of them by recursion, at the end of whose
# stack the process would end. 8 MiB are enough for 1800.
MAX_DEPTH = 1500
SCHEMA = "%json"  # before a schema within a grammar
REFERENCE = "$ref"
_LITERALS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/')  # of a grammar, and comments


def check_schema(schema: Any) -> None:
    """Raise ValueError for a schema that asks for too much."""
    _check_multiples(schema)
    _check_depth(num_levels(schema))


def check_grammar(source: str) -> None:
    """Raise ValueError for a grammar in Lark's notation that asks for too much, or has something else than a schema
    behind the mark of one.
    """
    text, *parts = source.split(SCHEMA)
    schemas, depth = [], _num_parts(text)
    for part in parts:
        schema, rest = _schema_before(part)
        schemas.append(schema)
        depth += _num_parts(rest)
    _check_multiples(schemas)
    _check_depth(depth + max(map(num_levels, schemas), default=0))


def num_levels(schema: Any) -> int:
    """How deep a schema is at most: its own nesting, and that of everything it refers to, once each."""
    targets = {target for target in _values_of(REFERENCE, schema) if isinstance(target, str)}
    nesting = _nesting(schema)
    return nesting + sum(_nesting(_at(schema, target)) or nesting for target in targets)


def _num_parts(text: str) -> int:
    """Rules, as lines, and groups of a grammar."""
    text = _LITERALS.sub("", text)
    return text.count("\n") + 1 + text.count("(") + text.count("[")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"its rules, groups and levels are {depth} together; must be at most {MAX_DEPTH}")


def _nesting(schema: Any) -> int:
    """Levels of objects and arrays; 0 for anything else."""
    depth, level = 0, [schema]
    while level := [each for each in level if isinstance(each, Mapping | list)]:
        depth += 1
        level = [child for each in level for child in (each.values() if isinstance(each, Mapping) else each)]
    return depth


def _at(schema: Any, pointer: str) -> Any:
    """What a JSON pointer within the schema leads to; None if it leads nowhere."""
    for step in pointer.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, Sequence) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def _schema_before(part: str) -> tuple[Any, str]:
    """The schema that the text begins with, and the rest."""
    decoder, text = json.JSONDecoder(object_pairs_hook=_no_repetition), part.lstrip()
    try:
        schema, end = decoder.raw_decode(text)
    except RecursionError:
        raise ValueError("a schema in it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"a schema in it is not JSON: {error.msg}") from None
    return schema, text[end:]


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is given twice llguidance might take the other one."""
    if len(parts := dict(pairs)) < len(pairs):
        raise ValueError("a schema in it has a key twice")
    return parts


def _check_multiples(schema: Any) -> None:
    product = Decimal(1)
    for multiple in _values_of("multipleOf", schema):
        is_number = isinstance(multiple, int | float) and not isinstance(multiple, bool)
        if is_number and (number := Decimal(str(multiple))).is_finite():
            product *= max(1, int("".join(map(str, number.normalize().as_tuple().digits))))
    if product > MAX_MULTIPLES:
        raise ValueError(f"the product of all multipleOf is {product}; must be at most {MAX_MULTIPLES}")


def _values_of(key: str, schema: Any) -> Iterator[Any]:
    """Every value under that key, at any level."""
    found = [schema]
    while found:
        match found.pop():
            case dict() as parts:
                if key in parts:
                    yield parts[key]
                found.extend(parts.values())
            case list() as parts:
                found.extend(parts)
