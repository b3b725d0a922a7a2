"""Which replicas hold which prefix blocks, as far as the gateway has been told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.expected_blocks import ExpectedBlocks
from shoal_cluster.policies.holder_table import make_table
from shoal_replica.prefix_cache import BlockHash

CROWDED = 0.25  # share of entries taken at which sets begin to fill up
DEFAULT_MAX_ENTRIES = 2**21
"""42 MB. Half full, at a million blocks, one entry in 100 000 is evicted early."""


class PrefixIndex:
    """Block hash → the replicas that hold it; and ``expected``, the blocks that replicas are about to hold.

    A hash covers all tokens before it and the cache salt, so a flat map serves as a prefix tree: a prefix is held as
    far as its hashes are. Device and host memory of a replica count as one holder, because its blocks cost a transfer
    at most; a separate memory would be a holder of its own.
    The map is a ``Table`` keyed by half of each hash. It evicts what was used least recently when it has no room (a
    forgotten hash only costs a predicted hit, never a wrong answer). So memory is fixed at 20 bytes an entry, plus the
    distinct sets of holders, which are few. ``store`` and ``touch`` count as use; ``match`` does not.

    Args:
        max_entries: hard cap; rounded up to whole sets, whose number is a power of two.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}; must be at least 1")
        self._table = make_table(max_entries)
        self.max_entries = self._table.max_entries
        self._version = 0
        self._slot_of: dict[str, int] = {}
        self.expected = ExpectedBlocks()

    def __len__(self) -> int:
        return self._table.num_entries

    @property
    def num_evicted(self) -> int:
        return self._table.num_evicted

    @property
    def version(self) -> int:
        """As long as it stays the same, so do the answers."""
        return self._version + self.expected.version

    @property
    def num_bytes(self) -> int:
        """Memory of the table, in bytes."""
        return self._table.num_bytes

    def num_held(self, replica_id: str) -> int:
        """How many hashes ``replica_id`` is known to hold."""
        slot = self._slot_of.get(replica_id)
        return 0 if slot is None else self._table.num_held(slot)

    def replica_ids(self) -> frozenset[str]:
        """Replicas that the index has heard of."""
        return frozenset(self._slot_of)

    def store(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """``replica_id`` now holds ``block_hashes``, deeper ones last. Those that it already holds count once."""
        slot, block_hashes = self._take_slot(replica_id), dict.fromkeys(block_hashes)
        if block_hashes:
            self._version += 1
            self._table.hold(slot, block_hashes)

    def expect(self, replica_id: str, block_hashes: Sequence[BlockHash], num_held: int) -> Sequence[BlockHash]:
        """A prompt goes to ``replica_id``, which holds its first ``num_held`` blocks or is about to: these are marked
        as used. Its blocks are expected there from the first that was expected already, else from the first that is
        new. Returns these; each stays expected until ``expected.remove`` takes it from the ``slot``.
        """
        self.touch(block_hashes, num_held)
        slot = self._take_slot(replica_id)
        rest = block_hashes[self.expected.first_at(slot, block_hashes[:num_held]) :]
        self.expected.add(slot, rest)
        return rest

    def change(self, replica_id: str, stored: Collection[BlockHash], removed: Collection[BlockHash]) -> None:
        """``remove``, then ``store``; no hash is in both."""
        self.remove(replica_id, removed)
        self.store(replica_id, stored)

    def remove(self, replica_id: str, block_hashes: Collection[BlockHash]) -> None:
        """``replica_id`` no longer holds ``block_hashes``. Those that it was not known to hold are ignored."""
        slot = self._slot_of.get(replica_id)
        if slot is not None and block_hashes:
            self._version += 1
            self._table.release(slot, block_hashes)

    def drop(self, replica_id: str) -> None:
        """Forget ``replica_id``, all that it holds and all that is expected there: one pass over the index."""
        self._clear_all(replica_id)
        if (slot := self._slot_of.pop(replica_id, None)) is not None:
            self.expected.drop(slot)

    def replace(self, replica_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """A snapshot: ``replica_id`` holds ``block_hashes`` and nothing else."""
        self._clear_all(replica_id)
        self.store(replica_id, block_hashes)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each replica that holds the first block, or is about to: the number of leading blocks without a gap."""
        counts = self.match_slots(block_hashes).tolist()
        return {replica_id: counts[slot] for replica_id, slot in self._slot_of.items() if counts[slot]}

    def match_slots(self, block_hashes: Sequence[BlockHash]) -> Ints:
        """``match`` as an array, at each replica's ``slot``: shape [slots]."""
        expected = self.expected
        return self._table.lengths(
            block_hashes, expected.holders(block_hashes) if expected.has_any(block_hashes) else ()
        )

    def slot(self, replica_id: str) -> int:
        """Where ``match_slots`` counts for ``replica_id``, which keeps this slot until it is dropped."""
        return self._take_slot(replica_id)

    def touch(self, block_hashes: Sequence[BlockHash], count: int | None = None) -> None:
        """The first ``count`` of ``block_hashes``, by default all, were used: a prefix loses its tail before its head.
        While there is plenty of room, recency does not matter and nothing is recorded.
        """
        if self._table.num_entries >= CROWDED * self.max_entries and block_hashes:
            self._table.use(block_hashes, count)

    def check_invariants(self) -> None:
        """Those of the table, where only known replicas hold anything; each replica has a slot of its own."""
        self._table.check_invariants(self._slot_of.values())
        assert len(set(self._slot_of.values())) == len(self._slot_of)

    def _clear_all(self, replica_id: str) -> None:
        if self.num_held(replica_id):
            slot = self._slot_of[replica_id]
            self._version += 1
            self._table.release_all(slot)

    def _take_slot(self, replica_id: str) -> int:
        slot = self._slot_of.get(replica_id)
        if slot is None:
            taken = set(self._slot_of.values())
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            if slot >= self._table.num_slots:
                self._table.add_slots()
            self._slot_of[replica_id] = slot
        return slot
