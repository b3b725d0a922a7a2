"""What is done about a call that has ended, and can wait: its line in the log, its trace."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shoal_cluster.serve.call_record import CallRecord
from shoal_cluster.serve.logs import error_fields, fields

DELAY_S = 0.05
"""From a call's end on. Answers that end together are soon followed by new requests, which would wait for all of it."""

AT_ONCE, PAUSE_S = 4, 0.002
"""So many calls are taken in one turn of the event loop, because streams wait for it; then it has other turns."""

MOST = 256
"""Above this backlog each call that ends also hands over AT_ONCE waiting records, so that the backlog stays bounded."""

logger = logging.getLogger(__name__)


class AfterCalls:
    """Hands records of calls that have ended to ``listeners``, in order, a little later. Used on one event loop. A
    listener that raises is logged, and holds up nobody.
    """

    def __init__(self, *listeners: Callable[[CallRecord], None]) -> None:
        self._listeners = listeners
        self._waiting: deque[CallRecord] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, record: CallRecord) -> None:
        self._waiting.append(record)
        if len(self._waiting) > MOST:
            self._hand_on(AT_ONCE)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._go_on)

    def finish(self) -> None:
        """Hand on all that wait, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hand_on(len(self._waiting))

    def _go_on(self) -> None:
        self._hand_on(AT_ONCE)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PAUSE_S, self._go_on) if self._waiting else None

    def _hand_on(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            record = self._waiting.popleft()
            for listener in self._listeners:
                try:
                    listener(record)
                except Exception as error:
                    logger.error("a call's record was not taken", extra=fields(**error_fields(error)))
