"""The latency that a deployment promises its users, and what follows from it for one request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_replica.errors import ConfigError

RENEWAL = 4.0

Seconds = TypeVar("Seconds", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """Seconds that a replica takes for a prompt: a rate for its matrix products, and a time for each (token, earlier
    token) pair of its attention, which matters in long prompts.
    """

    tokens_per_s: float = 8000.0
    pair_s: float = 2.5e-9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens_per_s) and self.tokens_per_s > 0):
            raise ConfigError(f"tokens_per_s: got {self.tokens_per_s!r}; must be a finite number above 0")
        if not (math.isfinite(self.pair_s) and self.pair_s >= 0):
            raise ConfigError(f"pair_s: got {self.pair_s!r}; must be a finite number of at least 0")

    def seconds(self, num_computed_tokens: int, num_new_tokens: int) -> float:
        """For ``num_new_tokens`` of a prompt after ``num_computed_tokens`` of it."""
        pairs = num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) / 2
        return num_new_tokens / self.tokens_per_s + self.pair_s * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """The first token is due ``ttft_s`` plus ``prefill_factor`` times the request's own uncached prefill after arrival.

    So a long prompt is allowed the time that it needs, and short ones do not pay for it.
    """

    ttft_s: float = 2.0
    prefill_factor: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttft_s) and self.ttft_s > 0):
            raise ConfigError(f"ttft_s: got {self.ttft_s!r}; must be a finite number above 0")
        if not (math.isfinite(self.prefill_factor) and self.prefill_factor >= 0):
            raise ConfigError(f"prefill_factor: got {self.prefill_factor!r}; must be a finite number of at least 0")

    def due_in_s(self, prefill_s: Seconds) -> Seconds:
        """Seconds from arrival until the first token is due, for a request whose own prefill takes ``prefill_s``."""
        return self.ttft_s + self.prefill_factor * prefill_s

    def next_due_s(self, arrival_s: float, prefill_s: float, first_token_s: float) -> float:
        """When the first token is due; if it cannot come before ``first_token_s``, the next date that can be met.

        A missed objective is renewed at ``RENEWAL`` times its length, as often as necessary. So requests that missed
        theirs take no time from those that can meet it. Yet none starves: its date comes nearer, newcomers' are later.
        """
        return self.renewed_s(arrival_s, self.due_in_s(prefill_s), first_token_s)

    @staticmethod
    def renewed_s(arrival_s: float, length_s: float, first_token_s: float) -> float:
        """The same for an objective whose length is known."""
        while arrival_s + length_s < first_token_s:
            length_s *= RENEWAL
        return arrival_s + length_s
