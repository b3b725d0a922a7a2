"""The prefix index against a dictionary of sets, with either of its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies.holder_table import HolderTable, Table
from shoal_cluster.policies.native_table import NativeTable
from shoal_cluster.policies.prefix_index import CROWDED, PrefixIndex
from shoal_replica.prefix_cache import BlockHash

REPLICAS = ("a", "b", "c", "d")
HASHES = [BlockHash(bytes([2 * i + 1, *range(15)])) for i in range(48)]
MAX_ENTRIES = 32  # one set, within which LRU eviction is exact


class DumbIndex:
    """For every replica, the hashes it holds and those expected there; for every hash, the tick of its last use."""

    def __init__(self) -> None:
        self.held: dict[str, set[BlockHash]] = {}
        self.expected: dict[str, Counter[BlockHash]] = {}  # number of prompts that bring each
        self.used: dict[BlockHash, int] = {}
        self.tick = 0

    def use(self, block_hashes: Sequence[BlockHash]) -> None:
        """The first becomes the most recent."""
        for block_hash in reversed(block_hashes):
            self.tick += 1
            self.used[block_hash] = self.tick

    def store(self, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        new = [h for h in dict.fromkeys(block_hashes) if h not in self.used]
        self.use(list(dict.fromkeys(block_hashes)))
        self.held.setdefault(replica_id, set()).update(block_hashes)
        entered = {h for h in self.used if h not in new}
        for block_hash in new:
            if len(entered) == MAX_ENTRIES:
                oldest = min(entered, key=self.used.__getitem__)
                entered.discard(oldest)
                del self.used[oldest]
                for hashes in self.held.values():
                    hashes.discard(oldest)
            entered.add(block_hash)

    def remove(self, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        self.held.setdefault(replica_id, set()).difference_update(block_hashes)
        self.used = {h: t for h, t in self.used.items() if any(h in hashes for hashes in self.held.values())}

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        if len(self.used) >= CROWDED * MAX_ENTRIES:
            self.use([h for h in block_hashes if h in self.used])

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        matched = {}
        for replica_id in REPLICAS:
            hashes = self.held.get(replica_id, set()) | (+self.expected.get(replica_id, Counter())).keys()
            count = 0
            while count < len(block_hashes) and block_hashes[count] in hashes:
                count += 1
            if count:
                matched[replica_id] = count
        return matched


some_hashes = st.one_of(
    st.lists(st.sampled_from(HASHES), max_size=24),
    st.builds(lambda start, count: HASHES[start : start + count], st.integers(0, 47), st.integers(0, 48)),
)
commands = st.lists(
    st.tuples(
        st.sampled_from(("store", "remove", "touch", "drop", "replace", "change", "expect", "forget")),
        st.sampled_from(REPLICAS),
        some_hashes,
    ),
    max_size=30,
)


@pytest.mark.parametrize("make_table", [HolderTable, NativeTable])
@settings(max_examples=150)
@given(
    commands=commands,
    queries=st.lists(some_hashes, min_size=1, max_size=4),
    num_others=st.sampled_from((0, 62, 200)),
    num_before=st.sampled_from((0, 30)),
)
def test_answers_as_the_dumb_index(
    make_table: Callable[[int], Table],
    commands: list[tuple[str, str, list[BlockHash]]],
    queries: list[list[BlockHash]],
    num_others: int,
    num_before: int,
) -> None:
    """In an empty index, and in one that is nearly full."""
    index, dumb = PrefixIndex(MAX_ENTRIES), DumbIndex()
    index._table = make_table(MAX_ENTRIES)
    for number in range(num_others):
        index.slot(f"other-{number}")
    for replica_id, block_hashes in (("a", HASHES[:num_before]), ("b", HASHES[10:num_before])):
        index.store(replica_id, block_hashes)
        dumb.store(replica_id, block_hashes)
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
                dumb.expected.pop(replica_id, None)
            case "replace":
                index.replace(replica_id, block_hashes)
                dumb.remove(replica_id, HASHES)
                dumb.store(replica_id, block_hashes)
            case "change":
                stored, removed = block_hashes[::2], set(block_hashes[1::2]) - set(block_hashes[::2])
                index.change(replica_id, stored, removed)
                dumb.remove(replica_id, list(removed))
                dumb.store(replica_id, stored)
            case "expect":
                prompt, brought = list(dict.fromkeys(block_hashes)), dumb.expected.setdefault(replica_id, Counter())
                count = dumb.match(prompt).get(replica_id, 0)
                rest = prompt[next((i for i, h in enumerate(prompt[:count]) if brought[h]), count) :]
                assert index.expect(replica_id, prompt, count) == rest
                dumb.touch(prompt[:count])
                brought.update(rest)
            case "forget":
                index.expected.remove(index.slot(replica_id), dict.fromkeys(block_hashes))
                dumb.expected[replica_id] = dumb.expected.get(replica_id, Counter()) - Counter(set(block_hashes))
        index.check_invariants()
        for query in queries:
            assert index.match(query) == dumb.match(query)
        assert len(index) == len(dumb.used)
        assert all(index.num_held(r) == len(dumb.held.get(r, ())) for r in REPLICAS)
        assert all(index.expected.num_held(index.slot(r)) == len(+dumb.expected.get(r, Counter())) for r in REPLICAS)
