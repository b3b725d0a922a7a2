"""How long cached blocks take from one replica to another, and whether to wait for them or compute."""

from __future__ import annotations

START_S = 0.005  # to connect and ask, beside what the blocks take
WEIGHT = 0.3  # of the newest transfer in the moving mean of a block's time
FORGET_S = 30.0
"""A pace slower than assumed comes halfway back in this time without a transfer: else one bad transfer could end them
all.
"""

WORTH = 0.5
"""Blocks are worth a transfer that should take at most this share of the time to compute them: both are estimates."""


class TransferPace:
    """Seconds per block: assumed at first, then a moving mean of what was measured. ``now`` is on any one clock."""

    def __init__(self, block_s: float) -> None:
        self._assumed_s = self._mean_s = block_s
        self._measured_s = 0.0  # when

    def block_s(self, now: float) -> float:
        slower_s = self._mean_s - self._assumed_s
        if slower_s <= 0:
            return self._mean_s
        return float(self._assumed_s + slower_s * 0.5 ** ((now - self._measured_s) / FORGET_S))

    def seconds(self, num_blocks: int, now: float) -> float:
        """How long so many blocks should take."""
        return START_S + num_blocks * self.block_s(now)

    def is_worth(self, num_blocks: int, compute_s: float | None, now: float) -> bool:
        """Whether to transfer blocks that take ``compute_s`` to compute; None if that is not known."""
        return num_blocks > 0 and (compute_s is None or self.seconds(num_blocks, now) <= WORTH * compute_s)

    def take(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record a transfer that took ``seconds`` from its request on."""
        before_s = self.block_s(now)
        self._mean_s = before_s + WEIGHT * (max(0.0, seconds - START_S) / num_blocks - before_s)
        self._measured_s = now
