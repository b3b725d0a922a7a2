"""What attention needs to know about a step, apart from its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each sequence's queries and keys are. Made once per step and shared by all layers.

    The queries of sequence ``i`` are rows ``query_start_loc[i]:query_start_loc[i + 1]`` of the step's tokens, and are
    the last ones of its ``seq_lens[i]`` tokens: row ``j`` from the end is at position ``seq_lens[i] - 1 - j``.
    Lengths are host integers, so that no backend has to read them back from the device.

    Attributes:
        query_start_loc: num_seqs + 1 ints, increasing from 0.
        seq_lens: num_seqs ints; tokens whose KV is in the cache once the step's tokens have been written.
        block_tables: int32 [num_seqs, max_blocks], block ids in order of position, padded with any valid id.
        slot_mapping: integers [num_tokens]; ``block_id * block_size + offset`` where each token's KV goes.
    """

    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Tensor
    slot_mapping: Tensor

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def query_lens(self) -> list[int]:
        starts = self.query_start_loc
        return [starts[i + 1] - starts[i] for i in range(len(self.seq_lens))]
