"""Refusing what the documentation of an operator refuses."""

from __future__ import annotations


class Refused(RuntimeError):
    """A call that, by the operator's documentation, a device would refuse or answer wrongly."""


def need(condition: bool, limit: str) -> None:
    """Raise Refused with the ``limit`` unless ``condition`` holds."""
    if not condition:
        raise Refused(limit)
