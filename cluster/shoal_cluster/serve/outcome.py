"""What a replica answers to a placed request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call to a replica ended. A refused request has left no trace there; ``reason`` says why."""

    refused: bool
    reason: str = ""
