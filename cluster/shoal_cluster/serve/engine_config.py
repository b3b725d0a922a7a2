"""From a cluster's configuration to that of one replica's engine."""

from __future__ import annotations

from shoal_cluster.config import ClusterConfig
from shoal_replica.build import resolve_config
from shoal_replica.config import EngineConfig


def engine_config(config: ClusterConfig, memory_bytes: int | None = None) -> EngineConfig:
    """The configuration of every replica's engine. Reads the checkpoint's folder, and makes it if it is missing.

    Args:
        memory_bytes: see ``resolve_config``.

    Raises:
        ConfigError, NotFound: as ``resolve_config`` does.
    """
    settings = config.replica
    return resolve_config(
        config.model,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        enable_prefix_caching=settings.enable_prefix_caching,
        num_host_blocks=settings.num_host_blocks,
        scheduler=settings.scheduler_config(),
        parallel=settings.parallel_config(),
        memory_bytes=memory_bytes,
        adapters=config.adapters,
    )
