"""A request that waits at the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.ranking import RouteQuery
from shoal_cluster.policies.wishes import Rank

MAX_PRIORITY = 2**31 - 1
"""A client's; it may ask for no less than the negative of it."""

RESUMED_PRIORITY = -MAX_PRIORITY - 1
"""Of a stream that goes on elsewhere: its client is in the middle of an answer. No client may ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request that waits at the gateway. ``arrival_s`` and ``deadline_s`` are on the clock of ``PendingQueue.next``'s
    ``now``; its order knows nothing of the deadline, which is the client's to choose.
    """

    query: RouteQuery
    arrival_s: float
    deadline_s: float = math.inf
    tenant: str = ""
    priority: int = 0  # lower goes first, whatever is due


class QueuePlace(NamedTuple):
    """Of a held request, as explained: where it is planned, "" for nowhere yet, and when it is due, from then."""

    request_id: str
    replica_id: str
    due_in_s: float


UNKNOWN = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Held:
    """``num_new_tokens`` to compute where it is cached best, as far as known: ``takes_s`` and ``due_s`` follow."""

    pending: PendingRequest
    num_new_tokens: int = 0
    asked_at: float = 0.0  # on the clock of ``FairShares``
    takes_s: float = 0.0
    is_lost: bool = False  # its objective: ``due_s`` is a later date;
    not_before_s: float = -math.inf  # no sooner one, until dates are made for all together
    num_counted_tokens: int = 0  # in the sum of its queue: none while it is lost
    lost_tokens: int = 0  # in its order: none while it is not
    due_s: float = 0.0
    length_s: float = 0.0  # of its objective
    is_particular: bool = False  # not every replica may take it
    matched: Ints = field(default_factory=lambda: UNKNOWN)  # blocks cached by replica,
    matched_s: float = -math.inf  # as of then,
    matched_of: tuple[str, ...] = ()  # of these replicas
    seed: int | None = None  # of its dice among equals: drawn once, so that it waits where it waited
    entry: tuple[Rank, int, Held] | None = None  # in the order of the queue,
    begins_by: tuple[float, int, Held] | None = None  # and in that of when they have to begin
    wish: tuple[str, int, int, int, int] | None = None  # where it was planned last, and the rest of a ``Wish``

    def queue_place(self, now: float) -> QueuePlace:
        return QueuePlace(self.pending.query.request_id, self.wish[0] if self.wish else "", self.due_s - now)
