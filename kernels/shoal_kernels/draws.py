"""What sampling asks of a row of logits, and what it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


class Draw(NamedTuple):
    """How a token is drawn: by temperature (above 0), then min-p, top-k (0 keeps all) and top-p, then ``uniform`` in
    [0, 1), at which the cumulative distribution in token-id order is inverted.
    """

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    uniform: float

    @property
    def divisor(self) -> float:
        """The temperature within limits: in float32 it must not become 0 or infinite, nor must a logit over it."""
        return min(max(self.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)

    @property
    def least_score(self) -> float:
        """p < min_p * max(p) in terms of logits over temperature, of which the maximum is 0: below log(min_p)."""
        return math.log(self.min_p) if self.min_p else -math.inf


class LogProbabilities(NamedTuple):
    """Natural logs of one token's probability, and of the likeliest tokens' as (token, log-probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class RowOperators(Protocol):
    """The operators of ``ops`` that sampling needs, as a backend or a decoder has them."""

    def draw(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]: ...

    def log_probabilities(
        self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[LogProbabilities]: ...
