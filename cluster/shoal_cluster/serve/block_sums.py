"""The cluster's block ledger: the sums of its replicas' counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal_cluster.serve.rows import ReplicaRow


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLedger:
    """Blocks by state: total = allocated + free; cached blocks are the free ones that still hold a prefix."""

    num_allocated_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_total_blocks: int

    @property
    def utilization(self) -> float:
        """Share of blocks that running sequences hold, in [0, 1]."""
        return self.num_allocated_blocks / self.num_total_blocks if self.num_total_blocks else 0.0


def sum_blocks(rows: Iterable[ReplicaRow]) -> BlockLedger:
    """The sums over the replicas that have sent stats."""
    spoken = [row.stats for row in rows if row.stats is not None]
    return BlockLedger(
        num_allocated_blocks=sum(stats.num_allocated_blocks for stats in spoken),
        num_cached_blocks=sum(stats.num_cached_blocks for stats in spoken),
        num_free_blocks=sum(stats.num_free_blocks for stats in spoken),
        num_total_blocks=sum(stats.num_total_blocks for stats in spoken),
    )
