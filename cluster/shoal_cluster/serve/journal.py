"""What happened, as this gateway saw it: a bounded log of events about replicas, streams and deployments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from shoal_cluster.shortened import shortened

MAX_EVENTS = 2000
SAME_WITHIN_S = 10.0
MAX_TEXT_CHARS = 240


class EventKind(StrEnum):
    """What an event is about. Events of a kind in ``COUNTED`` that come soon after each other, with none but others of
    these kinds between them, are counted together.
    """

    DEPLOYED = "deployed"
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    DIED = "died"
    DRAINING = "draining"
    STOPPED = "stopped"
    RESUMED = "resumed"
    REFUSED = "refused"
    FAILED = "failed"
    CHANGED = "changed"


COUNTED = frozenset({EventKind.RESUMED, EventKind.REFUSED, EventKind.FAILED})


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log.

    Attributes:
        seq: 1 for the first, then one more for each; an event that is counted again keeps its number.
        time_s: Unix time of the first of the ``count`` events.
        replica_id, request_id: of the last of the ``count`` events; empty if it concerns none.
    """

    seq: int
    time_s: float
    kind: EventKind
    text: str
    replica_id: str = ""
    request_id: str = ""
    count: int = 1


class Journal:
    """The last ``MAX_EVENTS`` events, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0

    def note(self, kind: EventKind, text: str, *, replica_id: str = "", request_id: str = "") -> None:
        """Add an event that happened now."""
        text = shortened(text, MAX_TEXT_CHARS)
        now = self._clock()
        place = self._same(kind, now)
        if place is not None:
            same = self._events[place]
            self._events[place] = msgspec.structs.replace(
                same, text=text, replica_id=replica_id, request_id=request_id, count=same.count + 1
            )
            return
        self._num_events += 1
        event = Event(
            seq=self._num_events, time_s=now, kind=kind, text=text, replica_id=replica_id, request_id=request_id
        )
        self._events.append(event)

    def _same(self, kind: EventKind, now: float) -> int | None:
        """The place of the event that one of ``kind`` is counted with; others that are counted may be in between."""
        if kind in COUNTED:
            for place in range(len(self._events) - 1, -1, -1):
                event = self._events[place]
                if event.kind not in COUNTED or now - event.time_s >= SAME_WITHIN_S:
                    return None
                if event.kind is kind:
                    return place
        return None

    def last(self, limit: int) -> list[Event]:
        """The newest ``limit`` events, oldest first."""
        return list(self._events)[-limit:] if limit > 0 else []
