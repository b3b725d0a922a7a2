"""The block pool: reference counts, and a free queue whose order is the order of eviction."""

from __future__ import annotations

import pytest

from shoal_replica.block_pool import BlockPool, FreeBlockQueue


class Content:
    """The content that a pool asks about: which blocks hold a prefix, and which of them were evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.held: set[int] = set()
        self.evicted: list[int] = []
        self.pool = BlockPool(num_blocks, self.held.__contains__, self.evict)

    def evict(self, block_id: int) -> None:
        self.held.remove(block_id)
        self.evicted.append(block_id)


def test_the_queue_takes_from_its_head_and_its_middle() -> None:
    queue = FreeBlockQueue(5)
    assert queue.in_order() == [0, 1, 2, 3, 4]
    queue.remove(2)
    queue.remove(4)
    assert queue.pop() == 0
    assert queue.in_order() == [1, 3]
    queue.push_tail(0)
    queue.push_head(4)
    assert queue.in_order() == [4, 1, 3, 0]
    assert len(queue) == 4


def test_an_empty_queue_has_nothing_to_give() -> None:
    queue = FreeBlockQueue(1)
    queue.pop()
    with pytest.raises(RuntimeError, match="empty"):
        queue.pop()
    queue.push_tail(0)
    assert queue.in_order() == [0]


def test_blocks_without_content_are_given_out_first() -> None:
    content = Content(4)
    pool = content.pool
    first, second = pool.allocate(2), pool.allocate(1)
    content.held.update(first)
    pool.free(first)
    pool.free(second)
    assert pool.num_cached == 2
    assert set(pool.allocate(2)) == {3, *second}
    assert content.evicted == []
    pool.check_invariants()


def test_a_prefix_loses_its_tail_before_its_beginning() -> None:
    content = Content(3)
    pool = content.pool
    table = pool.allocate(3)
    content.held.update(table)
    pool.free(table)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.num_cached == left
    assert content.evicted == table[::-1]
    pool.check_invariants()


def test_the_longest_unused_prefix_goes_first() -> None:
    content = Content(4)
    pool = content.pool
    old, young = pool.allocate(2), pool.allocate(2)
    content.held.update(old + young)
    pool.free(old)
    pool.free(young)
    pool.touch(old)  # used again
    pool.free(old)
    assert pool.allocate(2) == young[::-1]
    assert content.evicted == young[::-1]


def test_a_touched_block_is_neither_free_nor_cached() -> None:
    content = Content(2)
    pool = content.pool
    [block_id] = pool.allocate(1)
    content.held.add(block_id)
    pool.free([block_id])
    assert (pool.num_free, pool.num_cached, pool.num_allocated) == (2, 1, 0)
    pool.touch([block_id])
    assert (pool.num_free, pool.num_cached, pool.num_allocated) == (1, 0, 1)
    pool.touch([block_id])
    pool.free([block_id])
    assert pool.num_refs(block_id) == 1
    assert pool.num_allocated == 1
    pool.check_invariants()


def test_freeing_twice_is_a_bug() -> None:
    pool = Content(2).pool
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(RuntimeError, match="already free"):
        pool.free(table)


def test_asking_for_too_much_takes_nothing() -> None:
    pool = Content(3).pool
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 blocks were asked for and 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_invariants()


def test_the_invariants_notice_a_lost_block() -> None:
    pool = Content(2).pool
    pool.allocate(1)
    pool._num_refs[0] = 0
    with pytest.raises(AssertionError):
        pool.check_invariants()
