"""How fast prompts are computed here, as measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal_replica.executor import ScheduledSequence

MIN_TOKENS = 64
MIN_TOKENS_PER_SEQUENCE = 8
WEIGHT = 0.2  # of the newest step: the last ten or so count

WINDOW_S = 60.0
"""The fastest full step is that of the last one to two of these with any."""

FORGET_S = 300.0  # without a full step nothing is known any more
FULL = 0.9  # of the tokens that a step may have

MIN_FULL_STEPS = 3  # before that many, the fastest may be one that does first what is done once


class Pace(NamedTuple):
    """As in ``ReplicaStats``; 0 where nothing was measured."""

    token_s: float = 0.0
    full_token_s: float = 0.0


UNKNOWN_PACE = Pace()


class PrefillPace:
    """A moving mean over steps that were mostly prefill; steps of decodes say nothing of it. What it is depends on the
    prompts, too: short ones share a step's constant time among fewer tokens, and long ones read what is before them.

    So that replicas can be compared, whatever they compute: the fastest of the last full steps whose tokens read no
    more than a full step's worth of context each. What decodes beside them add is less than half of it.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_tokens = max_num_batched_tokens
        self._token_s = 0.0
        self._fastest, self._fastest_before = math.inf, math.inf  # of this window, and of the one before
        self._since_s = self._full_s = -math.inf  # when this window began, and when a full step ended
        self._num_full = 0

    def take(self, scheduled: Sequence[ScheduledSequence], num_decodes: int, step_s: float, now: float) -> None:
        """A step of ``step_s`` seconds that has ended ``now``; so many decodes were in it beside ``scheduled``."""
        num_tokens = sum(share.num_new_tokens for share in scheduled) + num_decodes
        if num_tokens < max(MIN_TOKENS, MIN_TOKENS_PER_SEQUENCE * (len(scheduled) + num_decodes)):
            return
        measured = step_s / num_tokens
        self._token_s = measured if not self._token_s else (1 - WEIGHT) * self._token_s + WEIGHT * measured
        if num_tokens < FULL * self._max_num_tokens:
            return
        if sum(s.num_new_tokens * s.num_computed_tokens for s in scheduled) <= num_tokens * self._max_num_tokens:
            self._take_full(measured, now)

    def told(self, now: float) -> Pace:
        """As of ``now``."""
        is_known = self._num_full >= MIN_FULL_STEPS and now - self._full_s <= FORGET_S
        return Pace(self._token_s, min(self._fastest, self._fastest_before) if is_known else 0.0)

    def _take_full(self, token_s: float, now: float) -> None:
        if now - self._full_s > FORGET_S:
            self._fastest, self._num_full = math.inf, 0
        if now - self._since_s > WINDOW_S:
            self._since_s, self._fastest_before, self._fastest = now, self._fastest, math.inf
        self._fastest = min(self._fastest, token_s)
        self._full_s = now
        self._num_full += 1
