"""Texts for places with little room."""

from __future__ import annotations


def shortened(text: str, max_chars: int) -> str:
    """``text``, or its beginning and an ellipsis if it has more than ``max_chars`` characters."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
