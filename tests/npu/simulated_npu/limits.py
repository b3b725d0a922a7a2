"""Refusing what the documentation of an operator refuses."""

from __future__ import annotations


class Refused(RuntimeError):
    """A call that a device would refuse, or answer wrongly, by the operator's documentation."""


def need(condition: bool, limit: str) -> None:
    """Raise Refused, saying the ``limit``, unless it is kept."""
    if not condition:
        raise Refused(limit)
