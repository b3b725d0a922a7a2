"""Requests that were refused and told when to try again."""

from __future__ import annotations

from heapq import heappop, heappush


class Returning:
    """Counts the prompt tokens that are still to come back. Without them each refused client would be told the moment
    at which there is room for one request, and all would come then.
    """

    def __init__(self) -> None:
        self._told: list[tuple[float, int]] = []  # a heap: when each comes back, and with how many tokens
        self._num_tokens = 0

    def note(self, num_tokens: int, returns_s: float) -> None:
        """A request with so many tokens to compute is to come back at ``returns_s``."""
        heappush(self._told, (returns_s, num_tokens))
        self._num_tokens += num_tokens

    def num_tokens(self, now: float) -> int:
        """Tokens to compute of the requests that come back after ``now``."""
        while self._told and self._told[0][0] <= now:
            self._num_tokens -= heappop(self._told)[1]
        return self._num_tokens
