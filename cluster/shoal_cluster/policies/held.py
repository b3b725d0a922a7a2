"""A request that waits at the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.columns import Ints, Phase
from shoal_cluster.policies.considered import Considered, Step
from shoal_cluster.policies.ranking import RouteQuery
from shoal_cluster.policies.wishes import Rank
from shoal_replica.prefix_cache import BlockHash

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


KnownEnd = tuple[BlockHash, Phase]
"""The last block of a prompt that replicas are known to cache, and what the request is placed for."""
UNKNOWN = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Held:
    """A held request and what its queue knows of it.

    It has ``num_new_tokens`` to compute where most of it is cached, as far as is known; ``takes_s`` (its prefill) and
    ``due_s`` (when its first token is due) follow from that.
    """

    pending: PendingRequest
    num_new_tokens: int = 0
    asked_at: float = 0.0  # when it came, on the clock of ``FairShares``
    takes_s: float = 0.0
    is_lost: bool = False  # it misses its objective: ``due_s`` is a later date
    not_before_s: float = -math.inf  # ``due_s`` is no earlier, until dates are made for all together
    due_s: float = 0.0
    length_s: float = 0.0  # of its objective, from arrival
    is_particular: bool = False  # not every replica may take it
    in_phase_since_s: float | None = None  # since when it is known to wait for replicas of one role
    matched: Ints = field(default_factory=lambda: UNKNOWN)  # blocks cached on each replica
    matched_s: float = -math.inf  # when ``matched`` was looked up
    matched_of: tuple[str, ...] = ()  # the replicas that ``matched`` speaks of
    noted: Ints = field(default_factory=lambda: UNKNOWN)  # as ``Alike`` last took in ``matched``:
    num_known_blocks: int = 0  # the most on a replica that may take it,
    known_end: KnownEnd | None = None  # and where these end
    sized_s: float = -math.inf  # when ``num_new_tokens`` was looked up
    seed: int | None = None  # breaks ties; drawn once, so that it goes on waiting at the same replica
    entry: tuple[Rank, int, Held] | None = None  # its place in the order of the queue
    begins_by: tuple[float, int, Held] | None = None  # and in the order of when requests have to begin
    considered: Considered | None = None  # as a look saw it last
    step: Step | None = None  # what a look decided for it last; None if its size has changed since
    wish: tuple[str, int, int, int, int] | None = None  # where it was planned last, and fields of its ``Wish``

    def queue_place(self, now: float) -> QueuePlace:
        return QueuePlace(self.pending.query.request_id, self.wish[0] if self.wish else "", self.due_s - now)
