"""What an engine tells those who follow it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.stats import ReplicaStats


@dataclass(frozen=True, slots=True)
class StepReport:
    """What has changed, for the engine's subscribers: new tokens, block events, and the ledger after them.

    ``step_s`` is the duration of the step that has just ended; None if the report was not caused by a step.
    """

    deltas: tuple[TokenDelta, ...]
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    stats: ReplicaStats
    step_s: float | None = None


Subscriber = Callable[[StepReport], None]


class Reports:
    """Makes reports and gives them to subscribers. Unless ``note_change`` was called since the last report, that one's
    stats object is used again until it is older than ``heartbeat_s``.

    Args:
        scheduler: whose block events are reported.
        stats: counts the present ledger.
    """

    def __init__(self, scheduler: Scheduler, stats: Callable[[], ReplicaStats], heartbeat_s: float) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._heartbeat_s = heartbeat_s
        self._subscribers: list[Subscriber] = []
        self._told = stats()
        self._is_changed = False
        self._to_tell = deque[StepReport]()  # the first is being told

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` with every report from now on. Returns a function that unsubscribes it."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def note_change(self) -> None:
        """The ledger has changed, or will have by the next report."""
        self._is_changed = True

    def publish(self, deltas: Iterable[TokenDelta] = (), step_s: float | None = None) -> None:
        """Tell the subscribers of ``deltas``, of block events since the last report, and of the present ledger. If one
        of them causes another report, all hear of that after this one.
        """
        stored, removed = self._scheduler.take_block_events()
        if self._is_changed or time.time() - self._told.time_s >= self._heartbeat_s:
            self._told = self._stats()
            self._is_changed = False
        self._to_tell.append(StepReport(tuple(deltas), tuple(stored), tuple(removed), self._told, step_s))
        if len(self._to_tell) > 1:
            return  # a subscriber has caused it: whoever tells the first tells this one after it
        try:
            while self._to_tell:
                for subscriber in tuple(self._subscribers):
                    subscriber(self._to_tell[0])
                self._to_tell.popleft()
        finally:
            self._to_tell.clear()
