"""Requests that arrive together at an idle engine start together, if earlier bursts showed that more would come."""

from __future__ import annotations

import math

WITHIN_S = 0.02
SLACK = 2.0
SHARE_OF_STEP = 0.5


class Burst:
    """How long an idle engine delays its first step for further requests.

    Clients that were answered together tend to send their next requests together. If a step started with the first of
    these requests, the others would wait until it ends. A burst is the requests that arrive at an idle engine within
    ``WITHIN_S`` of the first; its size is the largest number present at once. If the last two bursts had several
    requests each, the next burst's first step waits for as many as the smaller of the two had: at most ``SLACK`` times
    as long as the longer one took, and at most ``SHARE_OF_STEP`` of a step, because a late request would lose a step
    and those already present lose the wait. The engine does not wait if its step has no room for more.

    Times are seconds on any one clock.
    """

    def __init__(self) -> None:
        self._first_s = -math.inf
        self._count = self._before = self._expected = 0  # sizes: last burst, the one before it, expected now
        self._lasted_s = self._lasted_before_s = self._until_s = 0.0

    def note(self, now: float, num_present: int, step_s: float) -> None:
        """A request has arrived while ``num_present`` others are present; the engine's last step took ``step_s``."""
        if num_present == 0:
            self._expected = min(self._count, self._before)
            lasted_s = max(self._lasted_s, self._lasted_before_s)
            self._until_s = now + min(WITHIN_S, SLACK * lasted_s, SHARE_OF_STEP * step_s)
            self._before, self._lasted_before_s = self._count, self._lasted_s
            self._first_s, self._count, self._lasted_s = now, 1, 0.0
        elif now - self._first_s <= WITHIN_S and num_present >= self._count:
            self._count = num_present + 1
            self._lasted_s = now - self._first_s

    def left_s(self, now: float) -> float:
        """Seconds that the engine should still wait before its first step; 0 means start now."""
        return 0.0 if self._count >= self._expected else max(0.0, self._until_s - now)
