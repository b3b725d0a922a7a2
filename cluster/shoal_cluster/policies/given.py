"""What a plan has given away: requests, each to the replica that it is to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.columns import CAPACITY, LOAD, PER_CENT, ROOM, SEQUENCES, SLOWER, Ints
from shoal_cluster.policies.ranking import RouteQuery

Price = tuple[bool, float]
"""Whether there is no room for a request, and its cost; the lower is better."""


@dataclass(slots=True, eq=False)
class Given:
    """A request that is to wait for the replica at ``place``, and what that was decided by.

    Attributes:
        matched: blocks of its prompt cached on each replica [n]; ``num_matched_blocks`` of them at ``place``.
        num_blocks, num_tokens: blocks that it takes at ``place``, and prompt tokens to compute.
        least_blocks: free blocks that a replica needs at least to count as having room for it.
        prefill_price, sequence_price: price of each uncached token, and of each sequence on a replica.
        price: its price at ``place``, the lowest of all replicas.
        most_load: any other replica with more ``LOAD`` costs more; infinite while it has no room at ``place``.
    """

    query: RouteQuery
    place: int
    matched: Ints
    num_matched_blocks: int
    due_s: float
    num_blocks: int
    num_tokens: int
    least_blocks: int
    prefill_price: float
    sequence_price: float
    price: Price = (True, 0.0)
    most_load: float = np.inf

    def wait_at(self, column: Sequence[int], replica_ids: Sequence[str]) -> None:
        """It is to wait at its ``place``, whose column is given."""
        self.price = self.price_at(self.place, column, replica_ids)
        self.note_rivals()

    def note_rivals(self) -> None:
        """Compute ``most_load`` for its present ``price`` and matches."""
        has_no_room, cost = self.price
        self.most_load = np.inf
        if not has_no_room:
            before, after = self.matched[: self.place], self.matched[self.place + 1 :]
            num_tokens = max(before.max(initial=0), after.max(initial=0)) * self.query.block_size
            self.most_load = 1.0 + cost - self.prefill_price * max(1, self.query.num_prompt_tokens - int(num_tokens))

    def is_better_at(self, place: int, column: Sequence[int], replica_ids: Sequence[str]) -> bool:
        """Whether the replica at another ``place``, whose column is given, might be chosen now."""
        return column[LOAD] <= self.most_load and self.price_at(place, column, replica_ids) <= self.price

    def price_at(self, place: int, column: Sequence[int], replica_ids: Sequence[str]) -> Price:
        """The price at ``place``, whose column is given; infinite for a replica that cannot take it."""
        query, num_matched = self.query, self.matched.item(place)
        if column[CAPACITY] < query.num_blocks_needed or (query.excluded and replica_ids[place] in query.excluded):
            return True, np.inf
        uncached = max(1, query.num_prompt_tokens - num_matched * query.block_size)
        sequences = self.sequence_price * column[SEQUENCES]
        cost = uncached * self.prefill_price + column[LOAD] + sequences
        cost += column[SLOWER] * PER_CENT * (uncached + column[LOAD] + sequences)
        return column[ROOM] < max(self.least_blocks, query.num_blocks_needed - num_matched), cost
