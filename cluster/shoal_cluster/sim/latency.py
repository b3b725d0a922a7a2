"""How long a step takes: the only part of a model that the simulator approximates."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.policies.objective import PrefillTime
from shoal_replica.errors import ConfigError
from shoal_replica.executor import SchedulerOutput

LEAST_TOKENS_PER_S = 1.0  # below that the unit is probably seconds per token, and a run would not end
MOST_PAIR_S = 1e-5
MOST_STEP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Duration of a step in seconds, from measured rates.

    Attributes:
        prefill: time of a prompt chunk.
        step_s: fixed cost of every step.
        prefill_s: added once to a step that computes prompts, however few tokens.
        decode_s: added once to a step that decodes, however few sequences: reading the weights.
        decode_sequence_s, decode_context_s: added for each decoding sequence, and for each token of its context.
        move_s: time to move one block. Moves to host memory overlap with the step; moves back come before it.
    """

    prefill: PrefillTime = field(default_factory=PrefillTime)
    step_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.030
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    move_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill.tokens_per_s < LEAST_TOKENS_PER_S:
            raise ConfigError(
                f"tokens_per_s: got {self.prefill.tokens_per_s!r}; must be at least {LEAST_TOKENS_PER_S:g}"
            )
        if self.prefill.pair_s > MOST_PAIR_S:
            raise ConfigError(f"pair_s: got {self.prefill.pair_s!r}; must be at most {MOST_PAIR_S:g}")
        for name in ("step_s", "prefill_s", "decode_s", "decode_sequence_s", "decode_context_s", "move_s"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_STEP_S:
                raise ConfigError(f"{name}: got {value!r}; must be between 0 and {MOST_STEP_S:g}")

    def of(self, output: SchedulerOutput, num_decodes: int = 0, num_context_tokens: int = 0) -> float:
        """Seconds of one step: the prompt chunks, decodes (shares of one token that sample) and block moves in
        ``output``, plus ``num_decodes`` further decodes with ``num_context_tokens`` of context in total.
        """
        prefill_s = 0.0
        for share in output.scheduled:
            if share.num_new_tokens == 1 and share.samples:
                num_decodes += 1
                num_context_tokens += share.num_computed_tokens
            else:
                prefill_s += self.prefill.seconds(share.num_computed_tokens, share.num_new_tokens)
        if prefill_s:
            prefill_s += self.prefill_s
        computing_s = prefill_s + self.decode(num_decodes, num_context_tokens)
        return self.move_s * len(output.moves_in) + max(computing_s, self.move_s * len(output.moves_out))

    def decode(self, num_sequences: int, num_context_tokens: int) -> float:
        """Seconds of a step that only decodes."""
        if not num_sequences:
            return self.step_s
        varying_s = self.decode_sequence_s * num_sequences + self.decode_context_s * num_context_tokens
        return self.step_s + self.decode_s + varying_s
