"""Wishes: what other gateways mean to send where. With them, several gateways keep one order of due dates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_cluster.policies.route_query import PRICED_STEPS

Rank = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that some gateway holds and means to send to a certain replica when its turn comes.

    ``rank`` is its place in the order of ``PendingQueue``: its priority, the ``place`` of its tenant, and when its
    first token is due, on the reader's clock. ``num_blocks`` and ``num_tokens`` are what it will take there, as in
    ``Reservation``, beside the ``num_cached_blocks`` of its prompt; ``decode_steps`` is as in ``RouteQuery``. It came
    at ``arrival_s``, on the reader's clock, with an objective of ``length_s``: if it is due later than that, it is
    lost. ``is_over``: its tenant asks for more than its even share.
    """

    rank: Rank
    num_blocks: int
    num_tokens: int
    num_cached_blocks: int = 0
    decode_steps: int = PRICED_STEPS
    arrival_s: float = 0.0
    length_s: float = math.inf
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class PlacedWish:
    """A wish with the place of its replica in ``Candidates``."""

    wish: Wish
    place: int


class ForeignWishes:
    """The other gateways' wishes, by replica, as the replicas pass them on."""

    def __init__(self) -> None:
        self._by_replica: dict[str, Sequence[Wish]] = {}
        self._sorted: tuple[PlacedWish, ...] = ()
        self._sorted_for: Mapping[str, int] | None = None

    def set(self, replica_id: str, wishes: Sequence[Wish]) -> None:
        """Set all that is wished of ``replica_id`` now."""
        if wishes:
            self._by_replica[replica_id] = wishes
        elif self._by_replica.pop(replica_id, None) is None:
            return
        self._sorted_for = None

    def in_order(self, place_of: Mapping[str, int], now: float) -> Sequence[PlacedWish]:
        """The wishes for known replicas, the most urgent first. An overdue one no longer counts: a healthy gateway
        would have put it off.
        """
        if self._sorted_for is not place_of:
            placed = [
                PlacedWish(wish, place_of[replica_id])
                for replica_id, wishes in self._by_replica.items()
                if replica_id in place_of
                for wish in wishes
            ]
            self._sorted = tuple(sorted(placed, key=lambda placed: placed.wish.rank))
            self._sorted_for = place_of
        return [placed for placed in self._sorted if placed.wish.rank[2] >= now]
