"""Simulated time: a heap of timed callbacks."""

from __future__ import annotations

import heapq
from collections.abc import Callable

LAST = 2**62  # added to the sequence numbers of ``last`` events, so that they sort after all others


class EventLoop:
    """Runs callbacks in order of time. Those of one instant run in the order in which they were scheduled, but ``last``
    ones after all others. The loop never sleeps.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0

    def at(self, time_s: float, callback: Callable[[], None], *, last: bool = False) -> None:
        """Call ``callback`` at ``time_s``, now or later; ``last``: after the callbacks of that instant that are not.

        Raises:
            ValueError: ``time_s`` is in the past.
        """
        if time_s < self.now:
            raise ValueError(f"cannot set an event at {time_s}: it is {self.now} already")
        heapq.heappush(self._heap, (time_s, self._num_set + LAST if last else self._num_set, callback))
        self._num_set += 1

    def after(self, delay_s: float, callback: Callable[[], None], *, last: bool = False) -> None:
        self.at(self.now + delay_s, callback, last=last)

    def stop(self) -> None:
        """Drop all events that are still to come."""
        self._heap.clear()

    def run(self) -> None:
        """Run until no event is left."""
        while self._heap:
            self._next()

    def run_until(self, time_s: float) -> None:
        """Run all events before ``time_s``, then set the clock to it."""
        while self._heap and self._heap[0][0] < time_s:
            self._next()
        self.now = time_s

    def _next(self) -> None:
        self.now, _, callback = heapq.heappop(self._heap)
        self.num_events += 1
        callback()
