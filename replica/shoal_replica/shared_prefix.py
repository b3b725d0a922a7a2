"""Prompts that begin alike, at one replica at the same time: each common block is to be computed once."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Sequence, SequenceStatus

WORTH_A_STEP = 8  # an eighth of a whole step is: fewer tokens are sooner computed twice than waited for


def num_common_blocks(left: list[BlockHash], right: list[BlockHash]) -> int:
    """How many leading blocks two sequences have in common. A hash covers all before it, so halving finds the end."""
    low, high = 0, min(len(left), len(right))
    if not high or left[0] != right[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def expected_cached_tokens(sequence: Sequence, kv: KVCacheManager, others: Iterable[Sequence]) -> int:
    """Tokens that ``sequence`` will find cached: they are, or ``others``, before it, will have computed them."""
    if not kv.is_caching:
        return 0
    num_blocks = len(kv.match(sequence.block_hashes, sequence.num_tokens))
    common = (num_common_blocks(sequence.block_hashes, other.block_hashes) for other in others)
    return max(num_blocks, max(common, default=0)) * kv.block_size


def computed_by(
    sequence: Sequence, num_matched_blocks: int, computing: Iterable[Sequence], kv: KVCacheManager, whole_step: int
) -> Sequence | None:
    """Who of ``computing`` is about to compute what ``sequence``, which waits, needs next, and enough of it to be worth
    waiting for: half of what it has left to compute, or tokens worth a step. None that yields to it.

    Args:
        num_matched_blocks: of its prompt, that are cached now.
        computing: sequences with prompts to compute; what they have computed is cached.
        whole_step: the most tokens of a step.
    """
    block_size = kv.block_size
    last = (sequence.num_tokens - 1) // block_size  # the last token is always computed, so its block is not reused
    if not kv.is_caching or last <= num_matched_blocks:
        return None
    most, found = num_matched_blocks, None
    for other in computing:
        if other.status is not SequenceStatus.RUNNING or other.num_computed_tokens < num_matched_blocks * block_size:
            continue  # it is not as far yet, and would have to compute first what is cached by now
        if other.request.yields and not sequence.request.yields:
            continue
        num_common = min(last, num_common_blocks(sequence.block_hashes, other.block_hashes))
        if num_common > most:
            most, found = num_common, other
    num_left = sequence.num_tokens - num_matched_blocks * block_size
    num_shared = (most - num_matched_blocks) * block_size
    return found if 2 * num_shared >= num_left or WORTH_A_STEP * num_shared >= whole_step else None
