"""The policy's side of the scaling board: a thread beside Serve's control loop, which must not wait for anything."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.serve.freshness import Freshness
from shoal_cluster.serve.scaling_board import GatewayReport, ScalingBoard, Tuning

PERIOD_S = 0.5
MAX_UNSENT = 256
FORGOTTEN_S = 3600.0  # a gateway that was killed leaves its last report; one that lives writes another each second

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Inbox:
    """What the board held at the last exchange."""

    reports: tuple[GatewayReport, ...]
    tuning: Tuning | None


class BoardLink:
    """Exchanges news with the board at once and every PERIOD_S, until stopped. ``inbox`` is replaced as a whole and is
    None before the first exchange; ``tell`` never waits.
    """

    def __init__(self, board: ScalingBoard) -> None:
        self.inbox: Inbox | None = None
        self._board = board
        self._last: ScaleRecord | None = None
        self._unsent: deque[ScaleRecord] = deque()
        self._seq: int | None = None
        self._gateways = Freshness(FORGOTTEN_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-scaling-link", daemon=True)
        self._thread.start()

    def tell(self, record: ScaleRecord, *, changes: bool) -> None:
        """Queue a decision for the board: as the current one and, if it ``changes`` the count, as a record too."""
        self._last = replace(record, state=None)  # kept small: it is written twice a second
        if changes:
            if len(self._unsent) < MAX_UNSENT:
                self._unsent.append(record)
            else:
                logger.warning("a scaling decision is not recorded: Ray's head does not answer")

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.meet()
            except Exception:  # whatever it is, the next one may work; meanwhile the policy goes by the last
                logger.warning("no meeting at the scaling board; trying again", exc_info=True)
            self._stopped.wait(PERIOD_S)

    def meet(self) -> None:
        """Write what is queued for the board, and read what is there."""
        if self._seq is None:
            before = self._board.current()
            self._seq = 0 if before is None else before.seq
        while self._unsent:
            self._board.put_record(replace(self._unsent[0], seq=self._seq + 1))
            self._seq += 1
            self._unsent.popleft()
        if self._last is not None:
            self._board.put_current(replace(self._last, seq=self._seq))
        reports = self._board.reports()
        self.inbox = Inbox(tuple(reports), self._board.tuning())
        written_s = {report.gateway_id: report.time_s for report in reports}
        for gateway_id in written_s.keys() - self._gateways.look(written_s, time.time(), time.monotonic()):
            self._board.drop_report(gateway_id)
