"""How long a step takes: the only thing about a model that the simulator makes up."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.policies.objective import PrefillTime
from shoal_replica.errors import ConfigError
from shoal_replica.executor import SchedulerOutput

LEAST_TOKENS_PER_S = 1.0  # slower ones are seconds per token by mistake: a run would not end
MOST_PAIR_S = 1e-5
MOST_STEP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, from measured rates.

    Attributes:
        prefill: of a prompt's chunk.
        step_s: of any step, whatever is in it.
        decode_s: what a step that decodes takes beside that however few sequences do: reading the weights once.
        decode_sequence_s, decode_context_s: what each decoding sequence adds, and each token of its context.
        move_s: of each block that moves to host memory, while the step computes, or back, before it does.
    """

    prefill: PrefillTime = field(default_factory=PrefillTime)
    step_s: float = 0.0
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
        for name in ("step_s", "decode_s", "decode_sequence_s", "decode_context_s", "move_s"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_STEP_S:
                raise ConfigError(f"{name}: got {value!r}; must be between 0 and {MOST_STEP_S:g}")

    def of(self, output: SchedulerOutput, num_decodes: int = 0, num_context_tokens: int = 0) -> float:
        """Seconds of one step: its prompts' chunks and its decodes (shares of one token that samples), and of so many
        decodes, with a context of so many tokens, beside it; and its moves.
        """
        prefill_s = 0.0
        for share in output.scheduled:
            if share.num_new_tokens == 1 and share.samples:
                num_decodes += 1
                num_context_tokens += share.num_computed_tokens
            else:
                prefill_s += self.prefill.seconds(share.num_computed_tokens, share.num_new_tokens)
        computing_s = prefill_s + self.decode(num_decodes, num_context_tokens)
        return self.move_s * len(output.moves_in) + max(computing_s, self.move_s * len(output.moves_out))

    def decode(self, num_sequences: int, num_context_tokens: int) -> float:
        """Seconds of a step that does nothing but decode."""
        if not num_sequences:
            return self.step_s
        varying_s = self.decode_sequence_s * num_sequences + self.decode_context_s * num_context_tokens
        return self.step_s + self.decode_s + varying_s
