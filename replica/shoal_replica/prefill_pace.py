"""How fast prompts are computed here, as measured."""

from __future__ import annotations

MIN_TOKENS = 64
MIN_TOKENS_PER_SEQUENCE = 8
WEIGHT = 0.2  # of the newest step: the last ten or so count


class PrefillPace:
    """A moving mean over steps that were mostly prefill; steps of decodes say nothing of it."""

    def __init__(self) -> None:
        self.token_s = 0.0

    def take(self, num_tokens: int, num_sequences: int, step_s: float) -> None:
        """A step of ``step_s`` seconds has computed ``num_tokens`` of ``num_sequences`` sequences."""
        if num_tokens < max(MIN_TOKENS, MIN_TOKENS_PER_SEQUENCE * num_sequences):
            return
        measured = step_s / num_tokens
        self.token_s = measured if not self.token_s else (1 - WEIGHT) * self.token_s + WEIGHT * measured
