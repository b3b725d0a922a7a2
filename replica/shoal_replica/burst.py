"""Requests that come together to an idle engine begin together, as far as those before them did."""

from __future__ import annotations

import math

WITHIN_S = 0.02
SLACK = 2.0
SHARE_OF_STEP = 0.5


class Burst:
    """How long an idle engine's first step waits for company.

    A step that begins with the first of some requests that come together, as of clients who were answered together,
    keeps the others waiting until it ends. Requests within ``WITHIN_S`` of the first one of an idle engine are a burst,
    of as many as were there at once. Where the last two bursts were several, the next one's step waits until as many
    have come as the smaller of them was, at most ``SLACK`` times as long as the longer took, and ``SHARE_OF_STEP`` of
    a step: the others have a step to lose, and whoever is there loses the wait. An engine whose step
    would have no room for them does not ask.

    Times are seconds on any one clock.
    """

    def __init__(self) -> None:
        self._first_s = -math.inf
        self._count = self._before = self._expected = 0  # of the last burst, of that before, of this one
        self._lasted_s = self._lasted_before_s = self._until_s = 0.0

    def note(self, now: float, num_present: int, step_s: float) -> None:
        """A request has come, to ``num_present`` others; the engine's last step took ``step_s``."""
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
        """How long the engine, about to begin a step, waits yet: 0, it begins, and others find it at work."""
        return 0.0 if self._count >= self._expected else max(0.0, self._until_s - now)
