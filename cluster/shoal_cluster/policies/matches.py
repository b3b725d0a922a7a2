"""How much of a prompt each member of the cluster caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_replica.prefix_cache import BlockHash


class Matches:
    """The index's answers in order of the members. A placement asks more than once, so the last answer is kept.

    Attributes:
        slots: each member's slot in the index [n].
    """

    def __init__(self) -> None:
        self.slots: Ints = np.zeros(0, np.int64)
        self._are_slots_places = True
        self._asked: tuple[Sequence[BlockHash], int] = ((), -1)
        self._matched: Ints = self.slots

    def set_members(self, index: PrefixIndex, replica_ids: Sequence[str]) -> None:
        """From now on these are the members."""
        self.slots = np.array([index.slot(replica_id) for replica_id in replica_ids], np.int64)
        self._are_slots_places = self.slots.tolist() == list(range(len(replica_ids)))
        self._asked = (), -1

    def of(self, index: PrefixIndex, block_hashes: Sequence[BlockHash]) -> Ints:
        """Leading blocks of a prompt that each member caches [n]."""
        (before, version), now = self._asked, index.version
        if block_hashes is not before or now != version:
            matched = index.match_slots(block_hashes)
            self._matched = matched[: self.slots.size] if self._are_slots_places else matched[self.slots]
            self._asked = block_hashes, now
        return self._matched
