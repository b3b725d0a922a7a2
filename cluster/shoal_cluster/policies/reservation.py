"""A promise of room on a replica."""

from __future__ import annotations

from typing import NamedTuple


class Reservation(NamedTuple):
    """Room promised to a request on a replica, until the replica counts the request itself."""

    replica_id: str
    num_blocks: int
    num_tokens: int
