"""What a gateway remembers of its own decisions, for rules that go by that and not by what replicas report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_cluster.policies.route_query import RouteQuery

MAX_REMEMBERED_BLOCKS = 2**18


@dataclass(frozen=True, slots=True)
class Recollection:
    """The memory as one decision sees it.

    Attributes:
        turn: number of decisions before this one.
        num_sent_blocks: leading blocks of the prompt that were sent to each replica before [n].
        num_remembered_blocks: blocks remembered for each replica: the size of its tree [n].
    """

    turn: int
    num_sent_blocks: Ints
    num_remembered_blocks: Ints

    @classmethod
    def nothing(cls, num_replicas: int, turn: int = 0) -> Recollection:
        """What a memory without blocks recalls."""
        zeros = np.zeros(num_replicas, np.int64)
        return cls(turn, zeros, zeros)


class RoutingMemory:
    """Counts turns and keeps the prompts sent to each replica as a tree: the approximate prefix tree of routers that
    get no KV events from their engines. Bounded; the least recently used blocks are forgotten.
    """

    def __init__(self) -> None:
        self._num_turns = 0
        self._sent: PrefixIndex | None = None

    def recall(self, query: RouteQuery, candidates: Candidates) -> Recollection:
        """What is remembered that bears on ``query``."""
        if self._sent is None:
            return Recollection.nothing(len(candidates), self._num_turns)
        matched = self._sent.match(query.block_hashes)
        return Recollection(
            self._num_turns,
            np.array([matched.get(replica_id, 0) for replica_id in candidates.replica_ids], np.int64),
            np.array([self._sent.num_held(replica_id) for replica_id in candidates.replica_ids], np.int64),
        )

    def note(self, query: RouteQuery, replica_id: str, *, with_blocks: bool) -> None:
        """``query`` was placed; its blocks are remembered only ``with_blocks``, for rules that use them."""
        self._num_turns += 1
        if with_blocks:
            if self._sent is None:
                self._sent = PrefixIndex(MAX_REMEMBERED_BLOCKS)
            self._sent.store(replica_id, query.block_hashes)

    def forget(self, replica_id: str) -> None:
        """A replica has left."""
        if self._sent is not None:
            self._sent.drop(replica_id)
