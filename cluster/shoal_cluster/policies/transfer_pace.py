"""How long cached blocks take from one replica to another, and whether to wait for them or compute."""

from __future__ import annotations

START_S = 0.005  # to connect and ask, beside what the blocks take
WEIGHT = 0.3  # of the newest transfer in the moving mean of a block's time
WORTH = 0.5
"""Blocks are worth a transfer that should take at most this share of the time to compute them: both are estimates."""


class TransferPace:
    """Seconds per block: assumed at first, then a moving mean of what was measured."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s

    def seconds(self, num_blocks: int) -> float:
        """How long so many blocks should take."""
        return START_S + num_blocks * self.block_s

    def is_worth(self, num_blocks: int, compute_s: float | None) -> bool:
        """Whether to transfer blocks that take ``compute_s`` to compute; None if that is not known."""
        return num_blocks > 0 and (compute_s is None or self.seconds(num_blocks) <= WORTH * compute_s)

    def take(self, num_blocks: int, seconds: float) -> None:
        """Record a transfer."""
        measured_s = max(0.0, seconds - START_S) / num_blocks
        self.block_s += WEIGHT * (measured_s - self.block_s)
