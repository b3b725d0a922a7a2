"""What a replica records for the autoscaler: Serve carries numbers by name to its controller."""

from __future__ import annotations

from shoal_replica.stats import ReplicaStats

LEDGER_FIELDS = (
    "block_size",
    "num_total_blocks",
    "num_free_blocks",
    "num_allocated_blocks",
    "num_cached_blocks",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_steps",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_finished",
    "busy_s",
    "draining",
)


def ledger_metrics(stats: ReplicaStats) -> dict[str, float]:
    """``stats`` by the names of LEDGER_FIELDS."""
    return {name: float(getattr(stats, name)) for name in LEDGER_FIELDS}
