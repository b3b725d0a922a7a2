"""A request that waits at a gateway, and how it stands in the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shoal_cluster.policies.route_query import RouteQuery

MAX_PRIORITY = 2**31 - 1
"""The largest priority that a client may ask for; the smallest is its negative."""

RESUMED_PRIORITY = -MAX_PRIORITY - 1
"""For a stream that is resumed elsewhere: its client is in the middle of an answer. No client may ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request that waits at the gateway. ``arrival_s`` and ``deadline_s`` are on the clock of ``PendingQueue.next``'s
    ``now``. The client chooses the deadline, so the queue's order does not depend on it. A request that
    ``is_admitted`` has been placed before: it is not refused now for want of room.
    """

    query: RouteQuery
    arrival_s: float
    is_admitted: bool = False
    deadline_s: float = math.inf
    tenant: str = ""
    priority: int = 0  # lower goes first, whatever the due dates


class QueuePlace(NamedTuple):
    """How a held request stands: the replica where it is planned ("" for none yet), and seconds until it is due."""

    request_id: str
    replica_id: str
    due_in_s: float
