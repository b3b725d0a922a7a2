"""The gateway's side of scaling: it reports demand, reads what was decided, and takes new settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

from shoal_cluster.policies.autoscaling_config import ScaleConfig, tunable
from shoal_cluster.policies.autoscaling_view import Demand, ScaleRecord
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.freshness import Freshness
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.metrics.autoscaler import AutoscalerMetrics
from shoal_cluster.serve.metrics.tally import Point
from shoal_cluster.serve.rows import ScalingRow
from shoal_cluster.serve.scaling_board import RECORDS_KEPT, GatewayReport, ScalingBoard, Tuning
from shoal_replica.errors import Unavailable

PERIOD_S = 1.0
TUNE_TIMEOUT_S = 10.0
MAX_CURRENT_AGE_S = 10.0  # the policy decides several times a second: if its last decision is older, it has gone

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class DemandMeter:
    """Counts the demand at one gateway."""

    def __init__(self) -> None:
        self._demand = Demand()

    @property
    def demand(self) -> Demand:
        return self._demand

    def arrive(self, num_prompt_tokens: int) -> None:
        """Count the arrival of a request that can be served."""
        self._demand += Demand(num_requests=1, num_prompt_tokens=num_prompt_tokens)

    def take(self, record: CallRecord) -> None:
        """Count a call that is over, if it was refused for want of room."""
        if record.outcome is RequestOutcome.SHED:
            self._demand += Demand(num_shed=1)

    def hold(self, num_prompt_tokens: int, sign: int) -> None:
        """Count a request that begins (+1) or ceases (-1) to be held."""
        self._demand += Demand(num_held=sign, num_held_tokens=sign * num_prompt_tokens)


class ScalingDesk:
    """Exchanges news with the scaling board once per PERIOD_S, and at once when a request is held for lack of replicas.
    It begins when it is first told the deployment's settings (``rebase``), or by ``start``: what it reports is in force
    at once.

    Args:
        num_gateways: how many gateways report.
        base: the settings until then.
    """

    def __init__(self, board: ScalingBoard, ledger: GatewayLedger, num_gateways: int, base: ScaleConfig) -> None:
        self.meter = DemandMeter()
        self._board = board
        self._ledger = ledger
        self._num_gateways = num_gateways
        self._base, self._base_since_s = base, time.time()
        self._changes: dict[str, float] = {}
        self._current: ScaleRecord | None = None
        self._metrics = AutoscalerMetrics()
        self._records: deque[ScaleRecord] = deque(maxlen=RECORDS_KEPT)
        self._hurry = asyncio.Event()
        self._freshness = Freshness(MAX_CURRENT_AGE_S)
        self._meeting = asyncio.Lock()  # what an exchange reads must not undo a change made meanwhile
        self._thread = ThreadPoolExecutor(1, "shoal-scaling")  # its own: news is late where it waits for other work
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def row(self) -> ScalingRow:
        """Settings and decisions, as of the last exchange: at most PERIOD_S old while Ray's head answers."""
        return ScalingRow(
            config=self._base.tuned(self._changes),
            tuned=tuple(sorted(self._changes)),
            current=self._current,
            records=tuple(self._records),
        )

    def points(self) -> Iterator[Point]:
        """The autoscaler's series; none before its first decision."""
        if self._current is not None:
            yield from self._metrics.points()

    def is_growing(self) -> bool:
        """Whether replicas are starting, by a decision that is recent."""
        current = self._current
        if current is None or not self._is_current():
            return False
        return current.num_after > current.num_running

    def _is_current(self) -> bool:
        written_s = {} if self._current is None else {"policy": self._current.time_s}
        return bool(self._freshness.look(written_s, time.time(), time.monotonic()))

    @contextmanager
    def holding(self, num_prompt_tokens: int) -> Iterator[None]:
        """Context in which a request is held. The autoscaler is told at once of the first that no replica can take."""
        self.meter.hold(num_prompt_tokens, +1)
        if self.meter.demand.num_held == 1 and not self._ledger.can_place(frozenset()):
            self._hurry.set()
        try:
            yield
        finally:
            self.meter.hold(num_prompt_tokens, -1)

    def rebase(self, base: ScaleConfig) -> None:
        """Take the deployment's settings; if they are new, tuning of the old ones ends."""
        if base != self._base:
            self._base, self._base_since_s, self._changes = base, time.time(), {}
            self._hurry.set()
        self.start()

    def start(self) -> None:
        """Begin, if it has not yet and is not closed, with the settings that there are."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-scaling")

    async def tune(self, changes: Mapping[str, float], *, reset: bool) -> ScalingRow:
        """Change settings; with ``reset``, first go back to the deployment's.

        Raises:
            InvalidArgument: a name or value is not allowed; nothing changes.
            Unavailable: the settings could not be stored, or Ray's head does not answer: they may be stored later.
        """
        try:
            async with asyncio.timeout(TUNE_TIMEOUT_S), self._meeting:
                self._changes = await self._in_thread(self._retune, self._base, changes, reset)
        except TimeoutError:
            words = f"Ray's head has not answered for {TUNE_TIMEOUT_S:g} s; the settings may or may not change"
            raise Unavailable(words) from None
        return self.row()

    def _retune(self, base: ScaleConfig, changes: Mapping[str, float], reset: bool) -> dict[str, float]:
        """Store what differs from ``base`` from now on, and return it. Another gateway may just have stored more."""
        stored = None if reset else self._board.tuning()
        whole = (stored.changes if stored is not None and stored.base == base else {}) | dict(changes)
        tuned, plain = tunable(base.tuned(whole)), tunable(base)
        kept = {name: value for name, value in tuned.items() if value != plain[name]}
        self._board.put_tuning(Tuning(base, kept))
        return kept

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    def check_health(self) -> None:
        """Raise RuntimeError if reporting has ended, which only a bug can cause."""
        if self._task is not None and self._task.done():
            raise RuntimeError(f"the gateway reports to the autoscaler no longer: {self._task}")

    async def close(self) -> None:
        """Stop reporting, and remove this gateway's report."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self._in_thread(self._board.drop_report, self._ledger.gateway_id)  # after one on its way
        except Unavailable:
            logger.warning("the gateway's last scaling report stays until it is old", exc_info=True)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            self._hurry.clear()
            try:
                async with self._meeting:
                    await self._meet()
            except Unavailable:
                logger.warning("no meeting with the autoscaler; trying again", exc_info=True)
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    async def _meet(self) -> None:
        rows = self._ledger.view.replicas_for((), time.monotonic())
        report = GatewayReport(
            gateway_id=self._ledger.gateway_id,
            time_s=time.time(),
            demand=self.meter.demand,
            reserved_tokens={row.replica_id: row.num_reserved_tokens for row in rows},
            base=self._base,
            num_gateways=self._num_gateways,
            base_since_s=self._base_since_s,
        )
        last_seq = self._records[-1].seq if self._records else 0
        current, records, tuning = await self._in_thread(self._exchange, report, last_seq)
        self._current = current
        self._is_current()  # to notice now that the record has advanced
        self._records.extend(records)
        for record in records:
            self._metrics.take(record.num_before, record.num_after, record.num_running)
        if current is not None:
            self._metrics.take(current.num_after, current.num_after, current.num_running)
        if tuning is not None and report.base == self._base:
            self._changes = tuning.changes if tuning.base == self._base else {}

    def _exchange(
        self, report: GatewayReport, last_seq: int
    ) -> tuple[ScaleRecord | None, list[ScaleRecord], Tuning | None]:
        board = self._board
        board.put_report(report)
        current = board.current()
        records = [] if current is None or current.seq <= last_seq else board.records(last_seq, current.seq)
        tuning = board.tuning()
        has_ended = tuning is not None and tuning.base != report.base
        is_newest = has_ended and all(report.base_since_s >= each.base_since_s for each in board.reports())
        if is_newest and board.tuning() == tuning:  # nobody has tuned the new settings meanwhile
            board.drop_tuning()  # lest it comes back with the former ones
        return current, [replace(record, state=None) for record in records], tuning  # the state is most of a record
