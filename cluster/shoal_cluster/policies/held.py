"""A request that waits at the gateway, with what its queue knows of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.columns import Ints, Phase
from shoal_cluster.policies.considered import Assignment, Considered
from shoal_cluster.policies.pending_request import PendingRequest, QueuePlace
from shoal_cluster.policies.route_query import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.wishes import Rank, Wish
from shoal_replica.prefix_cache import BlockHash

KnownEnd = tuple[BlockHash, Phase]
"""The last block of a prompt that replicas are known to cache, and what the request is placed for."""
NOT_MATCHED = np.zeros(0, np.int64)


class Planned(NamedTuple):
    """Where a request is to wait, and what it takes there: as in ``Wish``."""

    replica_id: str
    num_blocks: int
    num_tokens: int
    num_matched_blocks: int
    decode_steps: int

    @classmethod
    def at(cls, replica_id: str, query: RouteQuery, num_matched_blocks: int) -> Planned:
        """At a replica that has that many blocks of its prompt cached."""
        return cls(
            replica_id=replica_id,
            num_blocks=uncached_blocks(query, num_matched_blocks),
            num_tokens=uncached_tokens(query, num_matched_blocks),
            num_matched_blocks=num_matched_blocks,
            decode_steps=query.decode_steps,
        )


@dataclass(slots=True, eq=False)
class Held:
    """A held request and what its queue knows of it.

    It has ``num_new_tokens`` to compute where most of it is cached, as far as is known; ``takes_s`` (its prefill) and
    ``due_s`` (when its first token is due) follow from that.
    """

    pending: PendingRequest
    seed: int | None = None  # breaks ties; drawn once, so that it goes on waiting at the same replica
    in_phase_since_s: float | None = None  # since when it is known to wait for replicas of one role
    # Its size
    num_new_tokens: int = 0
    sized_s: float = -math.inf  # when that was looked up
    asked_at: float = 0.0  # when it came, on the clock of ``FairShares``
    # Its dates, which ``DueDates`` makes
    takes_s: float = 0.0
    due_s: float = 0.0
    length_s: float = 0.0  # of its objective, from arrival
    is_lost: bool = False  # it misses its objective: ``due_s`` is a later date
    not_before_s: float = -math.inf  # ``due_s`` is no earlier, until dates are made for all together
    # What replicas have of it
    matched: Ints = field(default_factory=lambda: NOT_MATCHED)  # blocks cached on each replica
    matched_s: float = -math.inf  # when ``matched`` was looked up
    matched_of: tuple[str, ...] = ()  # the replicas that ``matched`` speaks of
    # The same as ``Alike`` has taken it in
    noted: Ints = field(default_factory=lambda: NOT_MATCHED)  # ``matched`` then
    num_known_blocks: int = 0  # the most on a replica that may take it
    known_end: KnownEnd | None = None  # where these end
    # Its places in ``HeldOrder``
    entry: tuple[Rank, int, Held] | None = None  # in the order of the queue
    begins_by: tuple[float, int, Held] | None = None  # in the order of when requests have to begin
    is_restricted: bool = False  # not every replica may take it
    # What looks made of it
    considered: Considered | None = None  # as a look saw it last
    assignment: Assignment | None = None  # what a look decided for it last; None if its size has changed since
    planned: Planned | None = None  # where it was planned last

    @property
    def objective_s(self) -> float:
        """When its first token must have come."""
        return self.pending.arrival_s + self.length_s

    def note_match(self, matched: Ints, replica_ids: tuple[str, ...], now: float) -> None:
        """Take in what these replicas have cached of its prompt."""
        self.matched, self.matched_of, self.matched_s = matched, replica_ids, now

    def queue_place(self, now: float) -> QueuePlace:
        replica_id = "" if self.planned is None else self.planned.replica_id
        return QueuePlace(self.pending.query.request_id, replica_id, self.due_s - now)

    def wish(self, planned: Planned, rank: Rank, is_over: bool) -> Wish:
        """To be sent where it is ``planned``, for other gateways."""
        return Wish(
            rank=rank,
            num_blocks=planned.num_blocks,
            num_tokens=planned.num_tokens,
            num_cached_blocks=planned.num_matched_blocks,
            decode_steps=planned.decode_steps,
            arrival_s=self.pending.arrival_s,
            length_s=self.length_s,
            is_over=is_over,
        )
