"""How long cached blocks take from one replica to another, and whether to wait for them or compute."""

from __future__ import annotations

from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request

START_S = 0.005  # to connect and ask, beside what the blocks take
WEIGHT = 0.3  # of the newest transfer in the moving mean of a block's time
FORGET_S = 30.0
"""A pace slower than assumed comes halfway back in this time without a transfer: else one bad transfer could end them
all.
"""

WORTH = 0.5
"""Blocks are worth a transfer that should take at most this share of the time to compute them: both are estimates."""


def usable_blocks(request: Request, num_offered: int, block_size: int) -> tuple[BlockHash, ...]:
    """The leading blocks that another replica offers and the request can use: its last token is always computed."""
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    return request.block_hashes[: min(num_offered, (num_tokens - 1) // block_size)]


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

    def is_worth(
        self, num_missing: int, num_before: int, *, has_begun: bool, block_compute_s: float | None, now: float
    ) -> bool:
        """Whether a request is to wait for ``num_missing`` blocks, behind ``num_before`` of others, rather than compute
        them in ``block_compute_s`` each (None: not known). To compute one that ``has_begun`` elsewhere would also delay
        what runs here.
        """
        num_in_turn = num_missing + num_before
        if num_missing == 0 or block_compute_s is None:
            return num_missing > 0
        num_instead = num_in_turn if has_begun else num_missing
        return self.seconds(num_in_turn, now) <= WORTH * num_instead * block_compute_s

    def take(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record a transfer that took ``seconds`` from its request on."""
        before_s = self.block_s(now)
        self._mean_s = before_s + WEIGHT * (max(0.0, seconds - START_S) / num_blocks - before_s)
        self._measured_s = now
