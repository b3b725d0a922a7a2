"""How a request that was sent to a replica ended there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call to a replica ended. A refused request has left no trace there; ``reason`` says why it was refused.
    ``field`` names its invalid field, if that is why: then no other replica should run it either. ``is_unheard``: the
    replica has no feed to the gateway now, but may well run the request once it has. ``is_full``: its queue is.
    """

    refused: bool
    reason: str = ""
    field: str = ""
    is_unheard: bool = False
    is_full: bool = False
