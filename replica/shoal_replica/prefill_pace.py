"""The measured speed at which this replica computes prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal_replica.executor import ScheduledSequence

MIN_TOKENS = 64
MIN_TOKENS_PER_SEQUENCE = 8
WEIGHT = 0.2  # of the newest step in the moving mean: about the last ten steps count

WINDOW_S = 60.0
"""The fastest full step is taken over the current and the previous window of this length that had full steps."""

FORGET_S = 300.0  # after this long without a full step, the pace is unknown again
FULL = 0.9  # of the tokens that a step may have

MIN_FULL_STEPS = 3  # with fewer, all measured steps may include one-time costs


class Pace(NamedTuple):
    """As in ``ReplicaStats``; 0 if nothing was measured."""

    token_s: float = 0.0
    full_token_s: float = 0.0


UNKNOWN_PACE = Pace()


class PrefillPace:
    """Seconds per prompt token: a moving mean over steps that were mostly prefill (decode steps say nothing about it).
    The mean depends on the prompts too: short ones share a step's constant time among fewer tokens, and the tokens of
    long ones attend to more context.

    To compare replicas whatever they compute, it also keeps the fastest of the recent full steps, of those whose tokens
    have on average no more tokens of context than a full step has tokens. Decodes beside them add less than half to it.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_tokens = max_num_batched_tokens
        self._token_s = 0.0
        self._fastest, self._fastest_before = math.inf, math.inf  # in this window, and in the one before
        self._since_s = self._full_s = -math.inf  # when this window began, and when the last full step ended
        self._num_full = 0

    def take(self, scheduled: Sequence[ScheduledSequence], num_decodes: int, step_s: float, now: float) -> None:
        """Record a step that took ``step_s`` seconds and ended ``now``, with ``num_decodes`` beside ``scheduled``."""
        num_tokens = sum(share.num_new_tokens for share in scheduled) + num_decodes
        if num_tokens < max(MIN_TOKENS, MIN_TOKENS_PER_SEQUENCE * (len(scheduled) + num_decodes)):
            return
        if any(share.num_scored or share.drafts for share in scheduled):
            return  # logits of many tokens take a while, and drafts are no prompts
        measured = step_s / num_tokens
        self._token_s = measured if not self._token_s else (1 - WEIGHT) * self._token_s + WEIGHT * measured
        if num_tokens < FULL * self._max_num_tokens:
            return
        if sum(s.num_new_tokens * s.num_computed_tokens for s in scheduled) <= num_tokens * self._max_num_tokens:
            self._take_full(measured, now)

    def told(self, now: float) -> Pace:
        """The pace as of ``now``."""
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
