"""How long prompts take at the replicas: as they measure it, and before any has, as configured."""

from __future__ import annotations

import math

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import PrefillTime

PACE_AGE_S = 0.1  # a pace is a mean over many steps: it is not looked up for every request


class Pace:
    """Owner: one gateway's queue.

    Attributes:
        alone: of a prompt that has a replica to itself, the fastest that was measured: what its objective allows for.
        among_others: as it is now, where running sequences take their part of each step: what it will take.
    """

    def __init__(self, configured: PrefillTime) -> None:
        self.alone = self.among_others = configured
        self._configured = configured
        self._least_token_s = math.inf
        self._looked_s = -math.inf

    def look(self, replicas: Candidates, now: float) -> bool:
        """Take what the replicas say as of ``now``. False: it has looked just now."""
        if now - self._looked_s < PACE_AGE_S:
            return False
        self._looked_s = now
        token_s = replicas.told["token_s"]
        measured = token_s[(token_s > 0) & replicas.told["connected"] & ~replicas.told["draining"]]
        if measured.size:
            self._least_token_s = min(self._least_token_s, float(measured.min()))
            self.alone = self._at(self._least_token_s)
            self.among_others = self._at(float(measured.mean()))
        return True

    @property
    def token_s(self) -> float:
        """Of one token, among others."""
        return 1.0 / self.among_others.tokens_per_s

    def _at(self, token_s: float) -> PrefillTime:
        return PrefillTime(tokens_per_s=1.0 / token_s, pair_s=self._configured.pair_s)
