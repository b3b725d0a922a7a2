"""The blocks of one replica: ids, reference counts, and a free queue that is the eviction order."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class FreeBlockQueue:
    """Doubly linked list over block ids; every operation is O(1), removal from the middle included.

    The head is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def pop(self) -> int:
        """Remove and return the head."""
        block_id = self._next[self._sentinel]
        if block_id == self._sentinel:
            raise RuntimeError("the free queue is empty")
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self._length -= 1

    def push_tail(self, block_id: int) -> None:
        self._insert(block_id, self._prev[self._sentinel])

    def push_head(self, block_id: int) -> None:
        self._insert(block_id, self._sentinel)

    def _insert(self, block_id: int, before: int) -> None:
        after = self._next[before]
        self._prev[block_id], self._next[block_id] = before, after
        self._next[before] = self._prev[after] = block_id
        self._length += 1

    def in_order(self) -> list[int]:
        """Block ids, next to be evicted first."""
        order = []
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            order.append(block_id)
            block_id = self._next[block_id]
        return order


class BlockPool:
    """``num_blocks`` blocks; each is free (no references) or allocated (one or more).

    Args:
        holds_prefix: whether a block's content may be reused; such blocks are evicted after all empty ones.
        on_evict: called with the id of a block that holds a prefix when it is given out and its content is lost.
    """

    def __init__(self, num_blocks: int, holds_prefix: Callable[[int], bool], on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._holds_prefix = holds_prefix
        self._on_evict = on_evict
        self._num_refs = [0] * num_blocks
        self._free = FreeBlockQueue(num_blocks)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_allocated(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a prefix."""
        return self._num_cached

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def heat(self) -> bytes:
        """One byte per block, in id order. 0: empty. 1 to 127: holds a prefix; higher values are evicted later. 128 and
        above: allocated, with 128 subtracted the number of references (capped at 127).
        """
        heat = bytearray(min(128 + num_refs, 255) if num_refs else 0 for num_refs in self._num_refs)
        cached = [block_id for block_id in self._free.in_order() if self._holds_prefix(block_id)]
        for rank, block_id in enumerate(cached, start=1):
            heat[block_id] = max(1, 127 * rank // len(cached))
        return bytes(heat)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference. The caller makes sure that there are enough."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks were asked for and {len(self._free)} are free")
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            if self._holds_prefix(block_id):
                self._num_cached -= 1
                self._on_evict(block_id)
            self._num_refs[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free queue if it had none."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                self._free.remove(block_id)
                self._num_cached -= self._holds_prefix(block_id)
            self._num_refs[block_id] += 1

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference of each block of a sequence, given in the sequence's order.

        The tail of a prefix is queued for eviction before its beginning, because more prompts share the beginning.
        """
        for block_id in reversed(block_ids):
            if self._num_refs[block_id] <= 0:
                raise RuntimeError(f"block {block_id} is already free")
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                if self._holds_prefix(block_id):
                    self._num_cached += 1
                    self._free.push_tail(block_id)
                else:
                    self._free.push_head(block_id)

    def check_invariants(self) -> None:
        """Each block is in the free queue exactly when it has no references."""
        free = self._free.in_order()
        assert len(free) == len(set(free)) == len(self._free)
        assert all(count >= 0 for count in self._num_refs)
        assert set(free) == {b for b, count in enumerate(self._num_refs) if count == 0}
        assert self._num_cached == sum(1 for b in free if self._holds_prefix(b))
