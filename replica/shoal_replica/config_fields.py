"""Fields of a Hugging Face ``config.json``, checked one by one. Null counts as absent."""

from __future__ import annotations

import math
from typing import Any

from shoal_replica.errors import ConfigError, shown


def size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """An integer of at least 1. Raises ConfigError, also where there is none and no default."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(key, value, "an integer of at least 1")
    return value


def number(raw: dict[str, Any], key: str, default: float | None = None, owner: str = "") -> float:
    """A finite number above 0, of the ``owner``. Raises ConfigError, also where there is none and no default."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise refusal(f"{key} of {owner}" if owner else key, value, "a number above 0")
    return float(value)


def fields_of(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """An object; empty where there is none. Raises ConfigError."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise refusal(key, value, "an object")
    return value


def numbers(raw: dict[str, Any], key: str, count: int) -> list[float]:
    """A list of so many finite numbers above 0. Raises ConfigError."""
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"model: {key} in config.json must be a list of {count} numbers above 0")
    return [number({key: value}, key) for value in values]


def refusal(key: str, value: object, what: str) -> ConfigError:
    """Of a field that must be ``what``; a field of a field is named "a of b"."""
    return ConfigError(f"model: {key} in config.json is {shown(value)}; must be {what}")
