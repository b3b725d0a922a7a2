"""What a plan has given away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.columns import CAPACITY, LOAD, PER_CENT, ROOM, SEQUENCES, SLOWER, Ints
from shoal_cluster.policies.ranking import RouteQuery

Price = tuple[bool, float]
"""Whether there is no room for a request, and the cost."""


@dataclass(slots=True, eq=False)
class Given:
    """A request that is to wait for a replica, and by what.

    Attributes:
        matched: blocks cached on each replica [n]; ``num_matched_blocks`` where it is to wait.
        num_blocks, num_tokens: what it takes there.
        least_blocks: that a replica must have free to count as one with room for it.
        prefill_price, sequence_price: of each uncached token, of each sequence there.
        price: where it is to wait; the least of all replicas.
        most_load: another replica with more to do costs more.
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
        """It is to wait at its ``place``, with that column."""
        self.price = self.price_at(self.place, column, replica_ids)
        self.note_rivals()

    def note_rivals(self) -> None:
        """It is to wait where it is, at its ``price``: ``most_load`` of the others."""
        has_no_room, cost = self.price
        self.most_load = np.inf
        if not has_no_room:
            before, after = self.matched[: self.place], self.matched[self.place + 1 :]
            num_tokens = max(before.max(initial=0), after.max(initial=0)) * self.query.block_size
            self.most_load = 1.0 + cost - self.prefill_price * max(1, self.query.num_prompt_tokens - int(num_tokens))

    def is_better_at(self, place: int, column: Sequence[int], replica_ids: Sequence[str]) -> bool:
        """Whether the replica at another ``place``, with that column, might be chosen now."""
        return column[LOAD] <= self.most_load and self.price_at(place, column, replica_ids) <= self.price

    def price_at(self, place: int, column: Sequence[int], replica_ids: Sequence[str]) -> Price:
        """Of the replica at ``place`` with that column; infinite for one that cannot take it."""
        query, num_matched = self.query, self.matched.item(place)
        if column[CAPACITY] < query.num_blocks_needed or (query.excluded and replica_ids[place] in query.excluded):
            return True, np.inf
        uncached = max(1, query.num_prompt_tokens - num_matched * query.block_size)
        sequences = self.sequence_price * column[SEQUENCES]
        cost = uncached * self.prefill_price + column[LOAD] + sequences
        cost += column[SLOWER] * PER_CENT * (uncached + column[LOAD] + sequences)
        return column[ROOM] < max(self.least_blocks, query.num_blocks_needed - num_matched), cost
