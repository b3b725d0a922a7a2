"""A whole cluster in simulated time: arrivals, admission, routing, replicas, feeds, autoscaling."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.sim.book import Book
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Crash, Hindrances, replica_name
from shoal_cluster.sim.gateway import SimGateway
from shoal_cluster.sim.replica import EndedReplica, FeedMessage, SimReplica
from shoal_cluster.sim.scaler import SimScaler
from shoal_cluster.sim.shared_pool import SharedIndex, SharedPool
from shoal_cluster.sim.transfers import Transfers
from shoal_cluster.sim.workload import SimRequest


class SimCluster:
    """Gateways and replicas on one simulated clock.

    Attributes:
        ended_beside: final state of replicas that were simulated in another process; None if they were simulated here.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.loop = EventLoop()
        self.book = Book(config)
        self.replicas: dict[str, SimReplica] = {}
        self.retired: list[SimReplica] = []
        self.shared_pool = SharedPool(config.num_replicas * config.cache.num_blocks) if config.has_shared_pool else None
        rng = Random(config.seed)
        self.gateways = [
            SimGateway(
                f"gateway-{number}",
                config,
                self.loop,
                self.book,
                self.replicas,
                self._view(),
                Random(rng.getrandbits(64)),
            )
            for number in range(config.num_gateways)
        ]
        self._gateway_by_id = {gateway.gateway_id: gateway for gateway in self.gateways}
        self.num_peak = 0
        self._rng = rng
        self._numbers = itertools.count()
        for _ in range(config.num_replicas):
            self._start_replica()
        self.start_beats()
        self.ended_beside: list[EndedReplica] | None = None
        self.scaler: SimScaler | None = None
        if config.scaling is not None:
            self.scaler = SimScaler(
                config.scaling,
                config.num_replicas,
                self.loop,
                self.replicas,
                self._look,
                self._start_replica,
                self._resume_cut,
                lambda: not self.book.num_open,
            )

    def _view(self) -> ClusterView:
        view = ClusterView()
        if self.shared_pool is not None:
            view.index = SharedIndex(self.shared_pool)
        return view

    def arrive(self, request: SimRequest) -> None:
        """Schedule a request to arrive at its ``arrival_s``, at a random gateway."""
        self.book.expect(request)
        gateway = self.gateways[self._rng.randrange(len(self.gateways))]
        self.loop.at(request.arrival_s, lambda: gateway.take(request))

    def ended(self) -> list[EndedReplica]:
        """Every replica that has existed, at the end of a run."""
        if self.ended_beside is not None:
            return self.ended_beside
        return [replica.ended() for replica in (*self.replicas.values(), *self.retired)]

    # Feeds

    def hear(self, replica_id: str, message: FeedMessage) -> None:
        """A replica's feed message has reached the gateways."""
        for delta in message.deltas:
            self.book.take(delta, self.loop.now)
        for gateway in self.gateways:
            gateway.hear(replica_id, message)
        for delta in message.deltas:
            if delta.finish_reason is not None:
                self._gateway_of(delta.request_id).end_part(delta, replica_id)
        replica = self.replicas.get(replica_id)
        if replica is not None and replica.draining and not replica.scheduler.has_work:
            self._retire(replica)

    def start_beats(self) -> None:
        """Every ``heartbeat_s``, let the replicas that are idle or in a long step send a heartbeat."""
        self.loop.after(self.config.heartbeat_s, self._beat, last=True)

    def _publish(self, replica: SimReplica, message: FeedMessage) -> None:
        self.loop.after(self.config.feed_delay_s, lambda: self.hear(replica.replica_id, message))

    def _beat(self) -> None:
        if not self.book.num_open:
            return
        for replica in self.replicas.values():
            if replica.is_idle or replica.told_s <= self.loop.now - self.config.heartbeat_s:
                replica.beat()
        self.start_beats()

    # Replicas

    def _start_replica(self) -> SimReplica:
        replica_id, now = replica_name(next(self._numbers)), self.loop.now
        faults = [fault for fault in self.config.faults if fault.replica_id == replica_id]
        crashes = [fault for fault in faults if isinstance(fault, Crash) and fault.from_s >= now]
        crash = min(crashes, key=lambda fault: fault.from_s, default=None)
        replica = SimReplica(
            replica_id,
            self.loop,
            self.config.scheduler,
            self.config.cache,
            self.config.step_time,
            self._publish,
            Hindrances(faults),
            math.inf if crash is None else crash.from_s,
            None if self.config.transfer_s is None else Transfers(self.config.transfer_s, self.replicas, self.loop),
        )
        replica.scheduler.shared_pool = self.shared_pool
        self.replicas[replica_id] = replica
        self.num_peak = max(self.num_peak, len(self.replicas))
        for gateway in self.gateways:
            gateway.meet(replica_id, replica.scheduler.stats(now))
        if crash is not None:
            self.loop.at(crash.from_s, partial(self._crash, replica, crash))
        return replica

    def _retire(self, replica: SimReplica) -> None:
        if self.replicas.pop(replica.replica_id, None) is not None:
            for gateway in self.gateways:
                gateway.lose(replica.replica_id)
            replica.ended_s = self.loop.now
            self.retired.append(replica)

    def _crash(self, replica: SimReplica, fault: Crash) -> None:
        if replica.replica_id not in self.replicas or not self.book.num_open:
            return
        replica.crash()
        self.loop.after(self.config.feed_delay_s, partial(self._lose, replica))
        if self.scaler is None:
            self.loop.at(fault.until_s, self._replace)

    def _lose(self, replica: SimReplica) -> None:
        """The gateways notice the crash: the replica's feed has broken off."""
        self._retire(replica)
        self._resume(self.book.open_at(replica.replica_id))

    def _replace(self) -> None:
        """Start a replica in place of one that crashed; it serves at once and announces itself."""
        if self.book.num_open:
            self._start_replica().beat()

    def _look(self) -> tuple[tuple[ReplicaView, ...], Demand]:
        """The replicas as the first gateway sees them, with the reservations of all gateways; and the total demand."""
        now = self.loop.now
        rows, *others = (gateway.view.replicas_for((), now) for gateway in self.gateways)
        promised = Counter[str]()
        for row in itertools.chain.from_iterable(others):
            promised[row.replica_id] += row.num_reserved_tokens
        whole = tuple(
            replace(row, num_reserved_tokens=row.num_reserved_tokens + promised[row.replica_id]) for row in rows
        )
        held = [pending for gateway in self.gateways for pending in gateway.queue or ()]
        num_held_tokens = sum(pending.query.num_prompt_tokens for pending in held)
        return whole, self.book.demand + Demand(num_held=len(held), num_held_tokens=num_held_tokens)

    def _resume_cut(self, request_ids: list[str]) -> None:
        """Resume requests that a drained replica cut off, once their last tokens have reached the gateway."""
        self.loop.after(self.config.feed_delay_s, partial(self._resume, request_ids))

    def _resume(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._gateway_of(request_id).resume(request_id)

    def _gateway_of(self, request_id: str) -> SimGateway:
        """The gateway at which a request has arrived."""
        return self._gateway_by_id[self.book.outcomes[request_id].gateway_id]
