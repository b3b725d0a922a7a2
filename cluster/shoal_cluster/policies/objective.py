"""What a deployment promises its users, and what follows from it for one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """The first token is due ``ttft_s`` plus ``prefill_factor`` times the request's own uncached prefill after arrival.

    A long prompt is thereby promised its fair time, and a short one does not pay for it.
    """

    ttft_s: float = 2.0
    prefill_factor: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttft_s) and self.ttft_s > 0):
            raise ConfigError(f"ttft_s: got {self.ttft_s!r}; must be a finite number above 0")
        if not (math.isfinite(self.prefill_factor) and self.prefill_factor >= 0):
            raise ConfigError(f"prefill_factor: got {self.prefill_factor!r}; must be a finite number of at least 0")

    def due_in_s(self, prefill_s: float) -> float:
        """Seconds from arrival until the first token is due, for a request whose own prefill takes ``prefill_s``."""
        return self.ttft_s + self.prefill_factor * prefill_s
