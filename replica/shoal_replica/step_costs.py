"""What steps take, as far as it decides whether draft tokens are worth computing."""

from __future__ import annotations

from shoal_replica.executor import MAX_DRAFT_TOKENS, SchedulerOutput

MOST_TOKENS = 2 * MAX_DRAFT_TOKENS  # of a step of decodes that is kept in mind
MIN_PROMPT_TOKENS = 8  # a step with fewer says little about what a token costs
FORGET = 1.02  # the least cost of a prompt's token so far grows by this with each step of prompts, so that it fades
FASTER, SLOWER = 0.5, 0.1  # weights of the newest step in a moving mean: one that has lost its core says little
MOST = 2.0  # a step's time is clipped to this multiple of the mean
MAX_AGE = 128  # steps of decodes after which one counts as unmeasured: contexts and neighbours change


class StepCosts:
    """Seconds of steps: of those that only decode, by their number of tokens (drafts are such tokens, too), and per
    token of a prompt, which is what one more token is taken to cost until it has been measured.

    Another thread may ask while a step is taken in.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * (MOST_TOKENS + 1)
        self._measured_at = [-MAX_AGE] * (MOST_TOKENS + 1)
        self._now = 0  # steps of decodes so far
        self._token_s = 0.0

    def take(self, output: SchedulerOutput, step_s: float) -> None:
        """A step has run."""
        count = output.num_tokens
        if count == len(output.scheduled) + sum(len(share.drafts) for share in output.scheduled):
            self._now += 1
            if count <= MOST_TOKENS:
                known = next(iter(self.of_decodes(count, count)), step_s)
                weight = FASTER if step_s < known else SLOWER
                self._seconds[count] = known + weight * (min(step_s, MOST * known) - known)
                self._measured_at[count] = self._now
        elif count >= MIN_PROMPT_TOKENS:
            self._token_s = min(FORGET * self._token_s or step_s, step_s / count)

    def of_decodes(self, least: int, most: int) -> list[float]:
        """Expected seconds of decode steps with ``least`` to ``most`` tokens; none if too little was measured."""
        most, below = min(most, MOST_TOKENS), min(least, MOST_TOKENS)
        while below and not self._is_known(below):
            below -= 1
        if not below or not self._token_s:
            return []
        seconds = self._seconds[below] + (least - below) * self._token_s
        expected = [seconds]
        for count in range(least + 1, most + 1):
            if self._is_known(count):
                seconds = max(seconds, self._seconds[count])  # more tokens never take less time
            else:
                seconds += self._token_s
            expected.append(seconds)
        return expected

    def _is_known(self, count: int) -> bool:
        return self._now - self._measured_at[count] < MAX_AGE
