"""How often drafts are right."""

from __future__ import annotations

from shoal_replica.prompt_lookup import MAX_MATCH

TYPICAL = (0.0, 0.2, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.9)
"""How often the first draft was right, by the length of its match, in chats, summaries and code of a small model."""

TYPICAL_WEIGHT = 8.0  # drafts that these odds count for
MAX_WEIGHT = 400.0  # drafts that are remembered


class DraftOdds:
    """How often drafts are right, by the length of the match that they follow. A draft after one that is right follows
    a match that is one token longer.
    """

    def __init__(self) -> None:
        self._tried = [TYPICAL_WEIGHT] * (MAX_MATCH + 1)
        self._right = [TYPICAL_WEIGHT * odds for odds in TYPICAL]

    def __getitem__(self, num_matched: int) -> float:
        length = min(num_matched, MAX_MATCH)
        return self._right[length] / self._tried[length]

    def take(self, num_matched: int, num_drafts: int, num_accepted: int) -> None:
        """Drafts after a match were tried: the first ``num_accepted`` were right, the next, if any, was wrong."""
        for i in range(min(num_drafts, num_accepted + 1)):
            length = min(num_matched + i, MAX_MATCH)
            self._tried[length] += 1.0
            self._right[length] += i < num_accepted
            if self._tried[length] > MAX_WEIGHT:
                self._tried[length] /= 2.0
                self._right[length] /= 2.0
