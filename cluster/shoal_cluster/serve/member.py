"""A replica as a gateway knows it from Serve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """A running replica as Serve names it, with its feed's address, the report of what its memory went to, and the
    address where it gives its cached blocks to others, None if it does not.
    """

    replica_id: str
    node_id: str
    feed_address: tuple[str, int]
    start_report: str = ""
    blocks_address: tuple[str, int] | None = None
