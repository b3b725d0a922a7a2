"""How much host memory is available, and how many KV blocks to allocate from it."""

from __future__ import annotations

from pathlib import Path

import psutil

from shoal_replica.memory_plan import MemoryPlan
from shoal_replica.model_config import ModelConfig

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")
CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")

DEFAULT_TOKENS_PER_SEQUENCE = 1024
POOL_SHARE = 0.8  # of the memory that weights and activations leave; the rest is for the process itself


def available_bytes() -> int:
    """Bytes of host memory that can still be allocated, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    if CGROUP_LIMIT.is_file() and (limit := CGROUP_LIMIT.read_text().strip()) != "max":
        stat = dict(line.split() for line in CGROUP_STAT.read_text().splitlines())
        # Cached file pages count as used, though the system reclaims them when memory is needed.
        used = int(CGROUP_USAGE.read_text()) - int(stat.get("inactive_file", 0))
        available = min(available, int(limit) - used)
    return max(0, available)


def default_num_blocks(model: ModelConfig, plan: MemoryPlan, block_size: int, max_num_seqs: int) -> int:
    """Blocks for ``max_num_seqs`` sequences of ordinary length, or one of full length if that is more, if they fit.

    At least 1: a pool that cannot hold the model at all is refused by ``MemoryPlan.check``.
    """
    tokens = max(model.max_model_len, max_num_seqs * min(model.max_model_len, DEFAULT_TOKENS_PER_SEQUENCE))
    wanted = -(-tokens // block_size)
    return max(1, min(wanted, int(plan.room_for_blocks * POOL_SHARE)))
