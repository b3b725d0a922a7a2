"""How long a step takes: the only thing about a model that the simulator makes up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal_cluster.policies.objective import PrefillTime
from shoal_replica.errors import ConfigError
from shoal_replica.executor import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, from measured rates.

    Attributes:
        prefill: of a prompt's chunk.
        decode_s: what a step that decodes takes however few sequences do: reading the weights once.
        decode_sequence_s: what each decoding sequence adds to that.
    """

    prefill: PrefillTime = field(default_factory=PrefillTime)
    decode_s: float = 0.030
    decode_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("decode_s", "decode_sequence_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: got {value!r}; must be a finite number of at least 0")

    def step_s(self, output: SchedulerOutput) -> float:
        """Seconds of one step: its prompts' chunks, then its decodes (shares of one token that samples)."""
        seconds = 0.0
        num_decodes = 0
        for share in output.scheduled:
            if share.num_new_tokens == 1 and share.samples:
                num_decodes += 1
            else:
                seconds += self.prefill.seconds(share.num_computed_tokens, share.num_new_tokens)
        if num_decodes:
            seconds += self.decode_s + self.decode_sequence_s * num_decodes
        return seconds
