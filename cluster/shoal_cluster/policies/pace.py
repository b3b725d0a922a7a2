"""How long prompts take at the replicas: as they measure it, or as configured before any has."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, SLOWER, Floats
from shoal_cluster.policies.objective import PrefillTime

PACE_AGE_S = 0.1  # a pace is a mean over many steps: it is not read for every request
LEAST_CHANGE = 0.02  # of the time that a prompt token takes: a smaller change leaves dates as they are


class Pace:
    """Owned by one gateway's queue.

    Attributes:
        alone: for a prompt that has a replica to itself, at the fastest pace that a present one has measured: what its
            objective allows for.
        token_s: seconds that a prompt token takes now, a mean over the fastest replicas, where running sequences take
            their part of each step. It includes the attention of prompts as they come.
    """

    def __init__(self, configured: PrefillTime) -> None:
        self.alone = configured
        self.token_s = 1.0 / configured.tokens_per_s
        self._least_of: dict[str, float] = {}  # the least ``token_s`` of each member so far
        self._looked_s = -math.inf

    def look(self, replicas: Candidates, now: float) -> bool:
        """Read what replicas report as of ``now``, unless it was read just now. Whether the pace has changed."""
        if not self.is_due(now):
            return False
        self._looked_s = now
        before = self.token_s, self.alone
        token_s = replicas.told["token_s"]
        takes = (token_s > 0) & (replicas.columns[CAPACITY] >= 0)
        measured, slower = token_s[takes], replicas.columns[SLOWER][takes]
        measured = measured[slower == slower.min(initial=np.iinfo(np.int64).max)]
        if measured.size:
            token_s_now = float(measured.mean())
            if abs(token_s_now - self.token_s) > LEAST_CHANGE * self.token_s:
                self.token_s = token_s_now
        self._note(replicas, token_s, takes)
        return before != (self.token_s, self.alone)

    def _note(self, replicas: Candidates, token_s: Floats, takes: NDArray[np.bool_]) -> None:
        """Take in what those that take requests measure, and forget those that have left, however fast they were."""
        before, names = self._least_of, replicas.replica_ids
        least_of = {name: least for name in names if (least := before.get(name)) is not None}
        for place in np.flatnonzero(takes).tolist():
            least_of[names[place]] = min(float(token_s[place]), least_of.get(names[place], math.inf))
        self._least_of = least_of
        if least_of:
            self.alone = PrefillTime(tokens_per_s=1.0 / min(least_of.values()), pair_s=self.alone.pair_s)

    def is_due(self, now: float) -> bool:
        """Whether ``look`` would look."""
        return now - self._looked_s >= PACE_AGE_S

    def seconds(self, num_computed_tokens: int, num_new_tokens: int) -> tuple[float, float]:
        """For ``num_new_tokens`` of a prompt after ``num_computed_tokens``: alone on a replica, and as it is now."""
        alone_s = self.alone.seconds(num_computed_tokens, num_new_tokens)
        return alone_s, max(alone_s, num_new_tokens * self.token_s)
