"""Steps over scrambled pages on the NPU, and their expected results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shoal_kernels import ops
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.npu_limits import BLOCK_SIZE

NPU = torch.device("npu:0")
DTYPE = torch.bfloat16
TOLERANCE = 2e-2  # bfloat16 keeps 8 bits

# (tokens already in the cache, tokens of this step) per sequence.
STEPS = {
    "prefill": [(0, 5), (0, 130), (0, 1)],
    "chunk": [(128, 70), (37, 150)],
    "prefix hit": [(256, 3), (128, 1)],
    "decode": [(1, 1), (127, 1), (128, 1), (300, 1)],
    "mixed": [(296, 4), (130, 70), (128, 1), (0, 17), (299, 1)],
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.device.type == "npu"
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class PagedStep:
    """A step's queries and caches on the CPU, the caches as [blocks, heads, block size, head size]."""

    metadata: AttentionMetadata
    q: Tensor
    keys: Tensor
    values: Tensor

    def on_npu(self) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Query, caches in the NPU's layout, metadata."""
        caches = (c.transpose(1, 2).contiguous().to(NPU) for c in (self.keys, self.values))
        return self.q.to(NPU), *caches, to_npu(self.metadata)

    def expected(self, scale: float, window: int | None = None) -> Tensor:
        """torch's attention in float32, sequence by sequence, over keys and values gathered from their pages."""
        outputs, starts = [], self.metadata.query_start_loc
        for index, seq_len in enumerate(self.metadata.seq_lens):
            q = self.q[starts[index] : starts[index + 1]]
            positions, keys = torch.arange(seq_len - len(q), seq_len)[:, None], torch.arange(seq_len)
            visible = (keys <= positions) & (keys > positions - (window or seq_len))
            pages = self.metadata.block_tables[index, : -(-seq_len // BLOCK_SIZE)].long()
            dense = (
                c[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].float()[None] for c in (self.keys, self.values)
            )
            out = functional.scaled_dot_product_attention(
                q.float().transpose(0, 1)[None], *dense, attn_mask=visible, scale=scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def actual(self, scale: float, window: int | None = None) -> Tensor:
        q, keys, values, metadata = self.on_npu()
        return ops.paged_attention(q, keys, values, metadata, scale, window)


def to_npu(metadata: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        block_tables=metadata.block_tables.to(NPU),
        slot_mapping=metadata.slot_mapping.to(NPU),
    )


def make_step(
    lengths: list[tuple[int, int]],
    *,
    head_size: int = 128,
    num_kv_heads: int = 2,
    group: int = 2,
    num_blocks: int = 16,
    shared_prefix: int = 0,
) -> PagedStep:
    """A step whose blocks are dealt at random; the first ``shared_prefix`` blocks are the same for all sequences."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
    shared = [order.pop() for _ in range(shared_prefix)]
    tables, slots, starts = [], [], [0]
    for computed, new in lengths:
        num_own = -(-(computed + new) // BLOCK_SIZE) - shared_prefix
        tables.append(shared + [order.pop() for _ in range(num_own)])
        positions = range(computed, computed + new)
        slots += [tables[-1][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        starts.append(starts[-1] + new)
    width = max(len(table) for table in tables)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=[computed + new for computed, new in lengths],
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_size)
    q = randn(starts[-1], num_kv_heads * group, head_size, seed=3)
    return PagedStep(metadata, q, randn(*shape, seed=1), randn(*shape, seed=2))
