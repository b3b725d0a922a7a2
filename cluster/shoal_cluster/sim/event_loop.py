"""Simulated time: a heap of what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable

LAST = 2**62  # added to the numbers of events that come last


class EventLoop:
    """Runs callbacks in order of their time; those of one instant in the order they were set, but for those that are to
    come last. Nothing ever waits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0

    def at(self, time_s: float, callback: Callable[[], None], *, last: bool = False) -> None:
        """Call ``callback`` at ``time_s``, which may be now but not before; ``last``: after all that is not."""
        if time_s < self.now:
            raise ValueError(f"cannot set an event at {time_s}: it is {self.now} already")
        heapq.heappush(self._heap, (time_s, self._num_set + LAST if last else self._num_set, callback))
        self._num_set += 1

    def after(self, delay_s: float, callback: Callable[[], None], *, last: bool = False) -> None:
        self.at(self.now + delay_s, callback, last=last)

    def stop(self) -> None:
        """Let nothing more happen."""
        self._heap.clear()

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self._next()

    def run_until(self, time_s: float) -> None:
        """Let everything happen that comes before ``time_s``; then it is that time."""
        while self._heap and self._heap[0][0] < time_s:
            self._next()
        self.now = time_s

    def _next(self) -> None:
        self.now, _, callback = heapq.heappop(self._heap)
        self.num_events += 1
        callback()
