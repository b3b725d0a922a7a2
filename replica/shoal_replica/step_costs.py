"""What steps take, as far as it decides whether guessed tokens are worth computing."""

from __future__ import annotations

from shoal_replica.executor import SchedulerOutput

MIN_PROMPT_TOKENS = 8  # a step with fewer says little about what a token costs
FORGET = 1.02  # by which the least cost of a prompt's token grows with each step that computes prompts
WEIGHT = 0.3  # of the newest step in a moving mean
MOST = 2.0  # times the mean that one step counts for: it may have lost its core


class StepCosts:
    """Seconds of steps in the model's forward pass: of those that only decode, by their number of tokens (drafts are
    such tokens, too), and per token of a prompt. A decode's token takes at most as long as a prompt's.
    """

    def __init__(self) -> None:
        self._decodes: dict[int, float] = {}
        self._token_s = 0.0

    def take(self, output: SchedulerOutput, forward_s: float) -> None:
        """A step has run."""
        num_tokens = output.num_tokens
        if num_tokens == len(output.scheduled) + sum(len(share.drafts) for share in output.scheduled):
            known = self._decodes.get(num_tokens, forward_s)
            self._decodes[num_tokens] = known + WEIGHT * (min(forward_s, MOST * known) - known)
        elif num_tokens >= MIN_PROMPT_TOKENS:
            self._token_s = min(FORGET * self._token_s or forward_s, forward_s / num_tokens)

    def of_decodes(self, least: int, most: int) -> list[float]:
        """Expected seconds of decode steps with ``least`` to ``most`` tokens; none if too little was measured."""
        below = max((count for count in self._decodes if count <= least), default=0)
        if not below or not self._token_s:
            return []
        seconds = self._decodes[below] + (least - below) * self._token_s
        expected = [seconds]
        for count in range(least + 1, most + 1):
            seconds = min(self._decodes.get(count, seconds + self._token_s), seconds + self._token_s)
            expected.append(seconds)
        return expected
