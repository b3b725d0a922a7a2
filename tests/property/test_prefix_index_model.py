"""The prefix index against a dictionary of sets."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_replica.prefix_cache import BlockHash

REPLICAS = ("a", "b", "c", "d")
HASHES = [BlockHash(bytes([i])) for i in range(12)]
MAX_ENTRIES = 8


class DumbIndex:
    """Every replica's hashes in a set; use order in a list, least recent first."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.held: dict[str, set[BlockHash]] = {}
        self.order: list[BlockHash] = []

    def use(self, block_hash: BlockHash) -> None:
        if block_hash in self.order:
            self.order.remove(block_hash)
        self.order.append(block_hash)

    def store(self, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self.held.setdefault(replica_id, set()).add(block_hash)
            self.use(block_hash)
        while len(self.order) > self.max_entries:
            oldest = self.order.pop(0)
            for hashes in self.held.values():
                hashes.discard(oldest)

    def remove(self, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        self.held.setdefault(replica_id, set()).difference_update(block_hashes)
        self.order = [h for h in self.order if any(h in hashes for hashes in self.held.values())]

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in reversed(block_hashes):
            if block_hash in self.order:
                self.use(block_hash)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        matched = {}
        for replica_id, hashes in self.held.items():
            count = 0
            while count < len(block_hashes) and block_hashes[count] in hashes:
                count += 1
            if count:
                matched[replica_id] = count
        return matched


some_hashes = st.lists(st.sampled_from(HASHES), max_size=6)
commands = st.lists(
    st.tuples(st.sampled_from(("store", "remove", "touch", "drop", "replace")), st.sampled_from(REPLICAS), some_hashes),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(commands=commands, queries=st.lists(some_hashes, min_size=1, max_size=4))
def test_answers_as_the_dumb_index(
    commands: list[tuple[str, str, list[BlockHash]]], queries: list[list[BlockHash]]
) -> None:
    index, dumb = PrefixIndex(MAX_ENTRIES), DumbIndex(MAX_ENTRIES)
    for name, replica_id, block_hashes in commands:
        match name:
            case "store":
                index.store(replica_id, block_hashes)
                dumb.store(replica_id, block_hashes)
            case "remove":
                index.remove(replica_id, block_hashes)
                dumb.remove(replica_id, block_hashes)
            case "touch":
                index.touch(block_hashes)
                dumb.touch(block_hashes)
            case "drop":
                index.drop(replica_id)
                dumb.remove(replica_id, HASHES)
            case "replace":
                index.replace(replica_id, block_hashes)
                dumb.remove(replica_id, HASHES)
                dumb.store(replica_id, block_hashes)
        index.check_invariants()
        for query in queries:
            assert index.match(query) == dumb.match(query)
        assert len(index) == len(dumb.order)
        assert all(index.num_held(r) == len(dumb.held.get(r, ())) for r in REPLICAS)
