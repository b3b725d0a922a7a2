"""Which part of a model each rank holds: the layers of its stage, and of each layer heads, MLP columns and experts."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_replica.config import ParallelConfig
from shoal_replica.model_config import DTYPE_BYTES, ModelConfig
from shoal_replica.weight_formats import GROUP_SIZE, LAYER_BITS

MLP_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part. Ranges use the whole model's numbering, and the ranks together cover the model.

    Shares may differ by one: nothing is padded, and every head count works for up to one rank per query head. If there
    are more ranks than KV heads, neighbouring ranks hold the same KV head and share its query heads. Every KV head of
    a rank serves the same number of the rank's query heads.

    Attributes:
        rank: counts through the ranks of stage 0, then those of stage 1, and so on.
        tensor_rank: number within the stage.
        vocab: rows of embedding and head; ``vocab_share`` rows, fewer on the last ranks.
    """

    rank: int
    stage: int
    num_stages: int
    tensor_rank: int
    tensor_size: int
    layers: range
    heads: range
    kv_heads: range
    mlp: range
    shared_mlp: range
    experts: range
    vocab: range
    vocab_share: int

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def samples(self) -> bool:
        """Whether this rank samples the step's tokens: the first rank of the last stage does."""
        return self.is_last_stage and self.tensor_rank == 0

    def block_bytes(self, model: ModelConfig, block_size: int) -> int:
        """Bytes of this rank's part of one KV block."""
        numbers = 2 * len(self.layers) * len(self.kv_heads) * model.head_size * block_size
        return numbers * DTYPE_BYTES[model.dtype]


def whole_shard(model: ModelConfig) -> Shard:
    """The shard of a single rank: everything."""
    return make_shard(model, ParallelConfig(), 0)


def make_shard(model: ModelConfig, parallel: ParallelConfig, rank: int) -> Shard:
    """The shard of ``rank``, one of ``parallel.num_ranks``."""
    size = parallel.tensor_parallel_size
    stage, tensor_rank = divmod(rank, size)
    heads, kv_heads = _heads(model.num_heads, model.num_kv_heads, size, tensor_rank)
    num_experts, shared_size = (model.moe.num_experts, model.moe.shared_size) if model.moe else (0, 0)
    least = 1 if LAYER_BITS[model.quantization] is None else GROUP_SIZE
    vocab_share = -(-model.vocab_size // size)
    return Shard(
        rank=rank,
        stage=stage,
        num_stages=parallel.pipeline_parallel_size,
        tensor_rank=tensor_rank,
        tensor_size=size,
        layers=_share(model.num_layers, parallel.pipeline_parallel_size, stage),
        heads=heads,
        kv_heads=kv_heads,
        mlp=_columns(model.intermediate_size, size, tensor_rank, least),
        shared_mlp=_columns(shared_size, size, tensor_rank, least) if shared_size else range(0),
        experts=_share(num_experts, size, tensor_rank),
        vocab=range(
            min(tensor_rank * vocab_share, model.vocab_size), min((tensor_rank + 1) * vocab_share, model.vocab_size)
        ),
        vocab_share=vocab_share,
    )


def _share(total: int, parts: int, index: int) -> range:
    """Part ``index`` of ``total`` items split into ``parts`` parts of nearly equal size, larger ones first."""
    size, more = divmod(total, parts)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))


def _columns(total: int, parts: int, index: int, least: int) -> range:
    """A share in units of the largest size that still divides well, so that vectors stay whole.

    ``least`` is the smallest unit to use if possible: a group of integer weights.
    """
    unit = next(u for u in MLP_UNITS if total % u == 0 and (_divides_well(total // u, parts, u <= least) or u == 1))
    share = _share(total // unit, parts, index)
    return range(share.start * unit, share.stop * unit)


def _divides_well(num_units: int, parts: int, is_small: bool) -> bool:
    return num_units % parts == 0 or num_units >= (parts if is_small else 8 * parts)


def _heads(num_heads: int, num_kv_heads: int, parts: int, index: int) -> tuple[range, range]:
    """The query heads of a rank, and the KV heads that they read."""
    group = num_heads // num_kv_heads
    if parts <= num_kv_heads:
        kv = _share(num_kv_heads, parts, index)
        return range(kv.start * group, kv.stop * group), kv
    holders = [_share(parts, num_kv_heads, kv_head) for kv_head in range(num_kv_heads)]
    kv_head = next(i for i, ranks in enumerate(holders) if index in ranks)
    mine = _share(group, len(holders[kv_head]), index - holders[kv_head].start)
    first = kv_head * group
    return range(first + mine.start, first + mine.stop), range(kv_head, kv_head + 1)
