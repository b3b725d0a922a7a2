"""Prompts with a common prefix that are at a replica at the same time: each common block is computed only once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from shoal_replica.kv_cache import Cached, KVCacheManager
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Sequence, SequenceStatus
from shoal_replica.step_plan import StepPlan

WORTH_A_STEP = 8  # an eighth of a whole step is: fewer tokens are computed twice sooner than waited for


def num_common_blocks(left: list[BlockHash], right: list[BlockHash]) -> int:
    """The number of leading blocks that two sequences have in common, by bisection: a hash covers all blocks before."""
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
    """Tokens that ``sequence`` will find cached: those cached now, or that ``others`` will have computed before it."""
    if not kv.is_caching:
        return 0
    num_blocks = len(kv.match(sequence.block_hashes, sequence.num_tokens))
    part = kv.match_within(sequence.block_hashes, num_blocks, sequence.tokens)
    num_cached = num_blocks * kv.block_size + (0 if part is None else part.num_tokens)
    own, most = sequence.block_hashes, num_blocks
    for other in others:  # there may be a thousand: most are done with after one comparison
        theirs = other.block_hashes
        if most < len(own) and most < len(theirs) and own[most] == theirs[most]:
            most = num_common_blocks(own, theirs)
    return max(num_cached, most * kv.block_size)


def take_over(sequence: Sequence, matched: Items[Cached], plan: StepPlan, kv: KVCacheManager) -> None:
    """Allocate the blocks of ``sequence`` and take over cached KV: the ``matched`` blocks, and the part of the next
    block that a cached block shares.
    """
    part = kv.match_within(sequence.block_hashes, len(matched), sequence.tokens)
    if part is not None:
        kv.refresh(part.block_id)
    table = kv.allocate(sequence.seq_id, matched, sequence.num_tokens)
    sequence.num_computed_tokens = len(matched) * kv.block_size
    if part is not None:
        plan.copy_block(part.block_id, table[len(matched)])
        sequence.num_computed_tokens += part.num_tokens


@dataclass(frozen=True, slots=True)
class Ahead:
    """A sequence that is about to compute what a waiting one needs next: both have the same first ``num_tokens``
    tokens, which are whole blocks.
    """

    sequence: Sequence
    num_tokens: int
    num_cached: int  # of these, cached already

    def is_worth_a_wait(self, waiting: Sequence, plan: StepPlan, whole_step: int) -> bool:
        """Whether ``waiting`` should wait instead of computing the same tokens. It should if they are worth a step, or
        if they are half of what it has left and the rest of this step cannot hold that, or the other is in this step.
        """
        num_shared = self.num_tokens - self.num_cached
        if WORTH_A_STEP * num_shared >= whole_step:
            return True
        num_left = waiting.num_tokens - self.num_cached
        return 2 * num_shared >= num_left and (num_left > plan.budget or plan.includes(self.sequence))


def find_ahead(
    sequence: Sequence, num_matched_blocks: int, computing: Iterable[Sequence], kv: KVCacheManager
) -> Ahead | None:
    """The sequence in ``computing`` that shares the longest prefix with ``sequence``, a waiting one, beyond what is
    cached. Sequences that yield to it do not count.

    Args:
        num_matched_blocks: blocks of its prompt that are cached now.
        computing: sequences with prompts to compute.
    """
    last = (sequence.num_tokens - 1) // kv.block_size  # the last token is always computed, so its block is not reused
    if not kv.is_caching or last <= num_matched_blocks:
        return None
    most, found = num_matched_blocks, None
    for other in computing:
        if (
            other.status is not SequenceStatus.RUNNING
            or other.num_computed_tokens // kv.block_size != num_matched_blocks
        ):
            continue  # behind, it computes what is cached anyway; ahead, its blocks are not the cached ones
        if other.request.yields and not sequence.request.yields:
            continue
        num_common = min(last, num_common_blocks(sequence.block_hashes, other.block_hashes))
        if num_common > most:
            most, found = num_common, other
    return None if found is None else Ahead(found, most * kv.block_size, num_matched_blocks * kv.block_size)
