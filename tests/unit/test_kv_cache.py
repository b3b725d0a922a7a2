"""Block tables: reuse, growth, copy-on-write, and free space."""

from __future__ import annotations

import pytest

from shoal_replica.config import CacheConfig
from shoal_replica.kv_cache import KVCacheManager, TableChange
from shoal_replica.prefix_cache import BlockHash, hash_blocks

TOKENS = list(range(100, 110))  # two and a half blocks of 4
HASHES = hash_blocks(TOKENS, 4)


def manager(num_blocks: int = 8, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4, enable_prefix_caching=caching))


def cached(kv: KVCacheManager) -> list[BlockHash]:
    """Run TOKENS through as sequence 0 and leave its full blocks cached."""
    kv.allocate(0, [], len(TOKENS))
    kv.commit(0, HASHES, len(TOKENS))
    kv.free(0)
    return HASHES


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert manager().num_blocks_for(num_tokens) == num_blocks


def test_full_blocks_are_found_again() -> None:
    kv = manager()
    hashes = cached(kv)
    assert len(kv.match(hashes, len(TOKENS))) == 2
    assert kv.pool.num_cached == 2
    kv.check_invariants()


def test_the_last_token_is_always_computed() -> None:
    kv = manager()
    hashes = cached(kv)
    assert [len(kv.match(hashes, n)) for n in (8, 9)] == [1, 2]


def test_without_caching_nothing_is_kept() -> None:
    kv = manager(caching=False)
    hashes = cached(kv)
    assert kv.match(hashes, len(TOKENS)) == []
    assert len(kv.prefix_cache) == 0


def test_a_question_changes_nothing() -> None:
    kv = manager()
    hashes = cached(kv)
    kv.allocate(1, kv.match(hashes, 8), 8)
    before = (kv.pool.num_free, kv.pool.num_cached, list(kv.block_table(1)), kv.pool._free.in_order())
    kv.match(hashes, 10)
    kv.can_allocate(kv.match(hashes, 10), 100)
    kv.num_blocks_to_append(1, 8, 30)
    assert before == (kv.pool.num_free, kv.pool.num_cached, list(kv.block_table(1)), kv.pool._free.in_order())


def test_reused_blocks_count_when_they_leave_the_free_queue() -> None:
    """Three free blocks, two of them the match: one is left to allocate."""
    kv = manager(num_blocks=4)
    hashes = cached(kv)
    kv.allocate(1, [], 4)
    matched = kv.match(hashes, len(TOKENS))
    assert kv.can_allocate(matched, 12)
    assert not kv.can_allocate(matched, 13)
    table = kv.allocate(2, matched, 12)
    assert table[:2] == matched
    assert kv.pool.num_free == 0
    kv.check_invariants()


def test_shared_blocks_cost_a_second_user_nothing() -> None:
    kv = manager(num_blocks=4)
    hashes = cached(kv)
    matched = kv.match(hashes, 10)
    kv.allocate(1, matched, 10)
    assert kv.pool.num_free == 1
    assert kv.can_allocate(matched, 12)
    kv.allocate(2, kv.match(hashes, 10), 10)
    assert kv.pool.num_refs(matched[0]) == 2
    kv.free(1)
    assert kv.pool.num_refs(matched[0]) == 1
    kv.check_invariants()


def test_appending_within_the_last_block_changes_nothing() -> None:
    kv = manager()
    kv.allocate(1, [], 5)
    assert kv.append(1, 5, 8) is None


def test_appending_past_it_grows_the_table() -> None:
    kv = manager()
    table = list(kv.allocate(1, [], 5))
    assert kv.num_blocks_to_append(1, 5, 13) == 2
    change = kv.append(1, 5, 13)
    assert change == TableChange(2, tuple(kv.block_table(1)[2:]))
    assert kv.block_table(1)[:2] == table
    kv.check_invariants()


def test_whoever_writes_a_shared_block_first_copies_it() -> None:
    kv = manager()
    parent = list(kv.allocate(1, [], 6))
    kv.fork(1, 2)
    assert kv.block_table(2) == parent
    assert kv.num_blocks_to_append(1, 6, 7) == 1
    change = kv.append(1, 6, 7)
    [new] = kv.block_table(1)[1:]
    assert change == TableChange(1, (new,), ((parent[1], new),))
    assert kv.block_table(2) == parent
    assert kv.append(2, 5, 6) is None, "the last one writes in place"
    kv.check_invariants()
    kv.free(1)
    kv.free(2)
    assert kv.pool.num_allocated == 0


def test_a_fork_of_a_full_block_copies_it_to_compute_its_last_token() -> None:
    kv = manager()
    parent = list(kv.allocate(1, [], 4))
    kv.commit(1, HASHES, 4)
    kv.fork(1, 2)
    assert kv.append(1, 4, 5) == TableChange(1, (kv.block_table(1)[1],)), "the parent only grows"
    change = kv.append(2, 3, 4)
    assert change is not None
    assert change.copies == ((parent[0], kv.block_table(2)[0]),)
    assert kv.match(HASHES, 5) == parent[:1], "the cached block stays the parent's"
    kv.check_invariants()


def test_copy_and_growth_come_together() -> None:
    kv = manager()
    kv.allocate(1, [], 3)
    kv.fork(1, 2)
    assert kv.num_blocks_to_append(2, 2, 9) == 3
    change = kv.append(2, 2, 9)
    assert change is not None
    assert (change.first_index, len(change.block_ids), len(change.copies)) == (0, 3, 1)


def test_a_table_is_made_once() -> None:
    kv = manager()
    kv.allocate(1, [], 1)
    with pytest.raises(RuntimeError, match="already has"):
        kv.allocate(1, [], 1)
    with pytest.raises(RuntimeError, match="already has"):
        kv.fork(1, 1)


def test_the_same_prefix_computed_twice_is_cached_once() -> None:
    kv = manager()
    kv.allocate(1, [], 10)
    kv.allocate(2, [], 10)
    kv.commit(1, HASHES, 10)
    kv.commit(2, HASHES, 10)
    assert kv.match(HASHES, 10) == kv.block_table(1)[:2]
    kv.free(1)
    kv.free(2)
    assert kv.pool.num_cached == 2
    kv.check_invariants()


def test_the_invariants_notice_a_table_nobody_counts() -> None:
    kv = manager()
    kv._tables[5] = [0]
    kv._num_committed[5] = 0
    with pytest.raises(AssertionError):
        kv.check_invariants()
