"""Checks of single fields of what clients send."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from shoal_replica.errors import InvalidArgument


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """``value`` as a tuple; None is empty."""
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidArgument(name, value, "must be a list")
    return tuple(value)


def check_integer(field: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise InvalidArgument(field, value, f"must be an integer of at least {low}{upper}")


def check_unicode(field: str, text: str) -> None:
    """Raise InvalidArgument for lone surrogates, which UTF-8 cannot encode: texts go to ranks and replicas in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(field, text, "must be valid Unicode, without lone surrogates") from None


def check_number(field: str, value: object, low: float, high: float, limit: str) -> None:
    """Raise InvalidArgument unless ``low <= value <= high``; NaN never is."""
    number = value if type(value) is float else _real(value)
    if not low <= number <= high:
        raise InvalidArgument(field, value, limit)


def _real(value: object) -> float:
    """``value`` as a float; NaN if it is not a number, or too large for a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
