"""How long a step takes: the only thing about a model that the simulator makes up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal_replica.errors import ConfigError
from shoal_replica.executor import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, from measured rates.

    Attributes:
        prefill_tokens_per_s: rate of a prompt's matrix products.
        pair_s: seconds for each (token, earlier token) pair of a prompt's attention: the quadratic term.
        decode_s: what a step that decodes takes however few sequences do: reading the weights once.
        decode_sequence_s: what each decoding sequence adds to that.
    """

    prefill_tokens_per_s: float = 8000.0
    pair_s: float = 2.5e-9
    decode_s: float = 0.030
    decode_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        rate = self.prefill_tokens_per_s
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"prefill_tokens_per_s: got {rate!r}; must be a finite number above 0")
        for name in ("pair_s", "decode_s", "decode_sequence_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: got {value!r}; must be a finite number of at least 0")

    def prefill_s(self, num_computed_tokens: int, num_new_tokens: int) -> float:
        """Seconds to compute ``num_new_tokens`` of a prompt after ``num_computed_tokens`` of it."""
        pairs = num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) / 2
        return num_new_tokens / self.prefill_tokens_per_s + self.pair_s * pairs

    def step_s(self, output: SchedulerOutput) -> float:
        """Seconds of one step: its prompts' chunks, then its decodes (shares of one token that samples)."""
        seconds = 0.0
        num_decodes = 0
        for share in output.scheduled:
            if share.num_new_tokens == 1 and share.samples:
                num_decodes += 1
            else:
                seconds += self.prefill_s(share.num_computed_tokens, share.num_new_tokens)
        if num_decodes:
            seconds += self.decode_s + self.decode_sequence_s * num_decodes
        return seconds
