"""The dashboard's state in a gateway: the timelines it keeps, and the update that all viewers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from shoal_cluster.serve.block_map import BlockMap
from shoal_cluster.serve.dashboard.history import SAMPLE_PERIOD_S, History
from shoal_cluster.serve.dashboard.meter import Meter
from shoal_cluster.serve.dashboard.replica_pasts import recalled
from shoal_cluster.serve.dashboard.roster import roster
from shoal_cluster.serve.dashboard.scaling import Scaling, scaling_now
from shoal_cluster.serve.dashboard.tally import RouteTally
from shoal_cluster.serve.dashboard.update import NUM_EVENTS, NUM_MARKS, NUM_ROUTES, build_update, encode_update
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.past_sample import PastSample
from shoal_replica.errors import NotFound, Unavailable

MAP_AGE_S = 0.5
RECALL_WITHIN_S = 60.0  # replicas that a new gateway meets later than this have started after it


class DashboardState:
    """Everything here happens on one event loop."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core
        self._meter = Meter()
        self._tally = RouteTally()
        self._maps: dict[str, asyncio.Task[BlockMap]] = {}  # asked for, or no older than MAP_AGE_S
        self.history = History()

    def update(self) -> bytes:
        """The cluster as it is now, as JSON."""
        cluster = self._core.cluster()
        routes = self._tally.count(self._core.recent_routes)
        update = build_update(
            cluster,
            roster(cluster.replicas, self._core.deployment()),
            routes[:NUM_ROUTES],
            self._tally,
            self._meter.rates(),
            self._meter.hit_rate(),
            self._scaling(),
            self._core.events(NUM_EVENTS),
            self.history.latest,
            time.time(),
        )
        return encode_update(update)

    async def block_map(self, replica_id: str) -> BlockMap:
        """A replica's blocks, at most ``MAP_AGE_S`` old: any number of viewers cost it one question.

        Raises:
            NotFound, Unavailable: as the core does.
        """
        asked = self._maps.get(replica_id)
        if asked is None:
            asked = self._maps[replica_id] = asyncio.create_task(self._core.block_map(replica_id))
            asked.add_done_callback(lambda answer: self._date_map(replica_id, answer))
        return await asyncio.shield(asked)  # others wait for it, too

    def _date_map(self, replica_id: str, answer: asyncio.Task[BlockMap]) -> None:
        """Let a map that has come be asked for anew when it is MAP_AGE_S old; one that has not, at once."""
        if answer.cancelled() or answer.exception() is not None:
            self._maps.pop(replica_id)
        else:
            asyncio.get_running_loop().call_later(MAP_AGE_S, self._maps.pop, replica_id)

    async def keep_history(self) -> None:
        """Sample the cluster until cancelled, with or without viewers: history is looked at afterwards."""
        while True:
            cluster = self._core.cluster()
            cards = roster(cluster.replicas, self._core.deployment())
            sample = self._meter.observe(cluster, cards, self._scaling().num_wanted, time.monotonic(), time.time())
            if sample is not None:
                self.history.add(sample)
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def recall_past(self) -> None:
        """Ask replicas that are older than this gateway what they remember, and put it before the history."""
        pasts: dict[str, Sequence[PastSample]] = {}
        end_s = time.monotonic() + RECALL_WITHIN_S
        while time.monotonic() < end_s:
            for row in self._core.cluster().replicas:
                if not row.connected or row.replica_id in pasts:
                    continue
                try:
                    pasts[row.replica_id] = await self._core.replica_past(row.replica_id)
                except (NotFound, Unavailable):
                    continue  # it will be asked again
                self.history.recall(recalled(pasts.values()))
            await asyncio.sleep(SAMPLE_PERIOD_S)

    def _scaling(self) -> Scaling:
        """The autoscaler's state; Serve's count of wanted replicas stands in until there is one."""
        scaling = scaling_now(self._core.scaling(), NUM_MARKS)
        deployment = self._core.deployment()
        if scaling.num_wanted is None and deployment is not None:
            return msgspec.structs.replace(scaling, num_wanted=deployment.num_wanted)
        return scaling
