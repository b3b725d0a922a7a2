"""The gateway's side of scaling: it reports what comes, reads what was decided, and takes new settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from ray.exceptions import RayError

from shoal_cluster.policies.autoscaling_config import ScaleConfig, tunable
from shoal_cluster.policies.autoscaling_view import Demand, ScaleRecord
from shoal_cluster.serve.call import ScalingRow
from shoal_cluster.serve.scaling_board import RECORDS_KEPT, GatewayReport, ScalingBoard, Tuning
from shoal_replica.errors import Unavailable

PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class ScalingDesk:
    """Meets the board once in PERIOD_S, and at once when told to ``hurry``.

    Args:
        base: the deployment's settings.
        demand: what this gateway has seen come, as of now.
        reserved_tokens: prompt tokens promised to each replica, as of now.
    """

    def __init__(
        self,
        board: ScalingBoard,
        gateway_id: str,
        num_gateways: int,
        base: ScaleConfig,
        demand: Callable[[], Demand],
        reserved_tokens: Callable[[], dict[str, int]],
    ) -> None:
        self._board = board
        self._gateway_id = gateway_id
        self._num_gateways = num_gateways
        self._base = base
        self._demand = demand
        self._reserved_tokens = reserved_tokens
        self._changes: dict[str, float] = {}
        self._current: ScaleRecord | None = None
        self._records: deque[ScaleRecord] = deque(maxlen=RECORDS_KEPT)
        self._hurry = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-scaling")

    def row(self) -> ScalingRow:
        """Settings and decisions, at most PERIOD_S old."""
        return ScalingRow(
            config=self._base.tuned(self._changes),
            tuned=tuple(sorted(self._changes)),
            current=self._current,
            records=tuple(self._records),
        )

    def hurry(self) -> None:
        """Report now: requests wait and there is no replica."""
        self._hurry.set()

    def rebase(self, base: ScaleConfig) -> None:
        """The deployment has new settings; tuning of the old ones ends."""
        self._base = base
        self._changes = {}
        self._hurry.set()

    async def tune(self, changes: Mapping[str, float], reset: bool) -> ScalingRow:
        """Change settings; with ``reset`` go back to the deployment's first.

        Raises:
            InvalidArgument: a name or value that is not allowed; nothing changes.
            Unavailable: the settings could not be stored.
        """
        whole = {} if reset else dict(self._changes)
        whole |= changes
        tuned = tunable(self._base.tuned(whole))
        base = tunable(self._base)
        kept = {name: value for name, value in tuned.items() if name in whole and value != base[name]}
        try:
            await asyncio.to_thread(self._board.put_tuning, Tuning(self._base, kept))
        except RayError as error:
            raise Unavailable(f"the settings could not be stored: {error}") from None
        self._changes = kept
        return self.row()

    def check_health(self) -> None:
        """Raise if reporting has ended, which only a bug does."""
        if self._task.done():
            raise RuntimeError(f"the gateway reports to the autoscaler no longer: {self._task}")

    async def close(self) -> None:
        """Stop, and leave no report behind."""
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            await asyncio.to_thread(self._board.drop_report, self._gateway_id)
        except RayError:
            logger.warning("the gateway's last scaling report stays until it is old", exc_info=True)

    async def _run(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self._meet()
            except RayError:
                logger.warning("no meeting with the autoscaler; trying again", exc_info=True)
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    async def _meet(self) -> None:
        report = GatewayReport(
            gateway_id=self._gateway_id,
            time_s=time.time(),
            demand=self._demand(),
            reserved_tokens=self._reserved_tokens(),
            base=self._base,
            num_gateways=self._num_gateways,
        )
        last_seq = self._records[-1].seq if self._records else 0
        current, records, tuning = await asyncio.to_thread(self._exchange, report, last_seq)
        self._current = current
        self._records.extend(records)
        if tuning is not None and report.base == self._base:
            self._changes = tuning.changes if tuning.base == self._base else {}

    def _exchange(
        self, report: GatewayReport, last_seq: int
    ) -> tuple[ScaleRecord | None, list[ScaleRecord], Tuning | None]:
        board = self._board
        board.put_report(report)
        current = board.current()
        records = [] if current is None or current.seq <= last_seq else board.records(last_seq, current.seq)
        return current, records, board.tuning()
