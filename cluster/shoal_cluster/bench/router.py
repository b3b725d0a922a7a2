"""What placing requests costs a gateway: decisions and ledger updates as in a busy cluster, on one core."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

import numpy as np
import psutil

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.dispatcher import Dispatcher, Waiter
from shoal_cluster.serve.feed_messages import Update
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.sent_requests import Follower
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash
from shoal_replica.stats import ReplicaStats

BLOCK_SIZE = 16
BLOCKS_PER_CONVERSATION = 125
BLOCKS_PER_TURN = 20
STEPS_PER_S = 30.0  # of each replica; every step is a feed message
MOST_REPORTS = 20  # of room, per replica, within which a held request must be sent
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """The cluster and its traffic: conversations of 125 blocks, prompts with 20 new blocks each, tenants in turn.

    ``num_held`` requests wait at the gateway throughout: only the replica that has just reported room has any.
    """

    num_replicas: int = 64
    num_blocks: int = 1_000_000
    num_requests: int = 20_000
    requests_per_s: float = 2_000.0
    num_tenants: int = 1
    num_held: int = 0
    seed: int = 0

    @property
    def num_conversations(self) -> int:
        return max(1, self.num_blocks // self.num_replicas // BLOCKS_PER_CONVERSATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCost:
    """CPU times in microseconds. A decision takes a request through the queue, records it and reserves its room. With
    held requests, it covers one request that arrives and stays, and another that is sent, with the report of free room
    that let it go.

    ``core_share`` is the share of one core that decisions and updates take at the load's rate.
    """

    num_replicas: int
    num_blocks: int
    num_requests: int
    requests_per_s: float
    num_tenants: int
    num_held: int
    num_updates: int
    matched_blocks_mean: float
    decision_p50_us: float
    decision_p99_us: float
    decision_max_us: float
    update_p50_us: float
    update_p99_us: float
    core_share: float
    index_bytes_per_entry: float
    index_forgotten_share: float


def measure_router(load: RouterLoad) -> RouterCost:
    """Run ``load`` as fast as possible and report the time of each part."""
    try:
        return asyncio.run(_measure(load))
    finally:
        gc.unfreeze()


async def _measure(load: RouterLoad) -> RouterCost:
    bench = _Bench(load)
    bench.fill()
    for number in range(load.num_held):
        bench.hold(-1 - number)
    bytes_per_entry = bench.num_index_bytes / len(bench.ledger.view.index)
    num_filled = bench.ledger.view.index.num_evicted + len(bench.ledger.view.index)
    forgotten = bench.ledger.view.index.num_evicted / num_filled
    num_updates = 0.0
    for number in range(load.num_requests):
        bench.request(number)
        num_updates += load.num_replicas * STEPS_PER_S / load.requests_per_s - 1
        while num_updates >= 1:
            num_updates -= 1
            bench.quiet_step()
    decisions, updates = np.array(bench.decisions_s) * MICROSECONDS, np.array(bench.updates_s) * MICROSECONDS
    return RouterCost(
        num_replicas=load.num_replicas,
        num_blocks=load.num_blocks,
        num_requests=load.num_requests,
        requests_per_s=load.requests_per_s,
        num_tenants=load.num_tenants,
        num_held=load.num_held,
        num_updates=len(updates),
        matched_blocks_mean=bench.num_matched / load.num_requests,
        decision_p50_us=float(np.percentile(decisions, 50)),
        decision_p99_us=float(np.percentile(decisions, 99)),
        decision_max_us=float(decisions.max()),
        update_p50_us=float(np.percentile(updates, 50)),
        update_p99_us=float(np.percentile(updates, 99)),
        core_share=float(decisions.sum() + updates.sum()) / MICROSECONDS / load.num_requests * load.requests_per_s,
        index_bytes_per_entry=bytes_per_entry,
        index_forgotten_share=forgotten,
    )


@dataclass(frozen=True, slots=True)
class _Came:
    """A request that has arrived: the replica that caches its conversation, the number of its blocks cached there, and
    its new blocks.
    """

    waiter: Waiter
    owner: str
    num_kept: int
    new: tuple[BlockHash, ...]


class _Bench:
    """A gateway's real ledger and dispatcher; replicas exist only as the feed messages they would send."""

    def __init__(self, load: RouterLoad) -> None:
        self._load = load
        self._rng = Random(load.seed)
        self.ledger = GatewayLedger("bench", RouteWeights())
        self._dispatcher = Dispatcher(
            self.ledger,
            HoldConfig(),
            AdmissionLimits(),
            lambda num_tokens: nullcontext(),
            patience_s=1.0,
            is_growing=lambda: False,
            start_failure=lambda: "",
        )
        self.replica_ids = [f"replica-{number:03d}" for number in range(load.num_replicas)]
        self._conversations: dict[str, deque[list[BlockHash]]] = {}
        self._seq = 0
        self._follower = Follower()
        self._came: dict[str, _Came] = {}  # requests not sent yet
        self._early_s = 0.0  # time of an update that already sent the next request
        self.num_index_bytes = 0
        self.num_matched = 0
        self.decisions_s: list[float] = []
        self.updates_s: list[float] = []

    def fill(self) -> None:
        """Let every replica join with its share of the blocks, and measure the memory that the index takes for them."""
        for replica_id in self.replica_ids:
            rows = [self._hashes(BLOCKS_PER_CONVERSATION) for _ in range(self._load.num_conversations)]
            self._conversations[replica_id] = deque(rows)
        gc.collect()
        before = psutil.Process().memory_info().rss
        for replica_id in self.replica_ids:
            self.ledger.view.join(replica_id)
            hashes = [h for row in self._conversations[replica_id] for h in row]
            self.ledger.view.apply_snapshot(replica_id, self._stats(), hashes, time.monotonic())
            del hashes
        gc.collect()
        gc.freeze()  # in a live cluster these lists are in other processes, out of the gateway's garbage collector
        self.num_index_bytes = psutil.Process().memory_info().rss - before
        for replica_id in self.replica_ids:  # heartbeats: the first was filled seconds ago
            self.ledger.hear(replica_id, Update(0, None, (), (), (), ()))

    def hold(self, number: int) -> None:
        """A request arrives that will be held."""
        self._come(number)

    def request(self, number: int) -> None:
        """One request arrives and one is placed. The chosen replica accepts it, caches its blocks and evicts others."""
        took_s, self._early_s = self._come(number) + self._early_s, 0.0
        num_left = MOST_REPORTS * self._load.num_replicas if self._load.num_held else 0
        while (came := self._first_sent()) is None:
            num_left -= 1
            if num_left < 0:
                raise RuntimeError("the load does not fit the cluster: a request would have to wait")
            self._step(self._rng.choice(self.replica_ids), (), (), (), has_room=True)
            if self._first_sent() is not None:
                took_s += self.updates_s.pop()
        self.decisions_s.append(took_s)
        dispatch = came.waiter.turn.result()
        request_id, chosen = dispatch.pending.query.request_id, dispatch.decision.best
        del self._came[request_id]
        self._dispatcher.leave(dispatch.pending)
        self.num_matched += came.num_kept if chosen == came.owner else 0
        self.ledger.routed(request_id, chosen)
        oldest = self._conversations[chosen].popleft()
        removed, left = oldest[-BLOCKS_PER_TURN:], oldest[:-BLOCKS_PER_TURN]
        self._conversations[chosen].append(left if len(left) > BLOCKS_PER_TURN else [*came.new, *left])
        self._step(chosen, came.new, tuple(removed), (request_id,))
        if self._first_sent() is not None:  # that report has already sent the next request
            self._early_s = self.updates_s.pop()
        self.ledger.unfollow(request_id)

    def _first_sent(self) -> _Came | None:
        return next((came for came in self._came.values() if came.waiter.turn.done()), None)

    def _come(self, number: int) -> float:
        """Let a request arrive; return the seconds that it took."""
        owner = self._rng.choice(self.replica_ids)
        rows = self._conversations[owner]
        conversation = rows[self._rng.randrange(len(rows))]
        kept = conversation[: self._rng.randrange(len(conversation) - BLOCKS_PER_TURN)]
        new = tuple(self._hashes(BLOCKS_PER_TURN))
        hashes = (*kept, *new)
        query = RouteQuery(
            request_id=f"request-{number}",
            block_hashes=hashes,
            num_prompt_tokens=len(hashes) * BLOCK_SIZE + 5,
            num_blocks_needed=len(hashes) + 1,
            block_size=BLOCK_SIZE,
        )
        tenant = f"tenant-{number % self._load.num_tenants}"
        self.ledger.follow(query.request_id, self._follower)
        started = time.thread_time()
        waiter = self._dispatcher.enter(PendingRequest(query=query, arrival_s=time.monotonic(), tenant=tenant))
        took_s = time.thread_time() - started
        self._came[query.request_id] = _Came(waiter, owner, len(kept), new)
        return took_s

    def quiet_step(self) -> None:
        """A step of some replica that caches no new block."""
        self._step(self._rng.choice(self.replica_ids), (), (), ())

    def _step(
        self,
        replica_id: str,
        stored: tuple[BlockHash, ...],
        removed: tuple[BlockHash, ...],
        accepted: tuple[str, ...],
        has_room: bool = False,
    ) -> None:
        self._seq += 1
        message = Update(self._seq, self._stats(has_room), stored, removed, (), accepted)
        started = time.thread_time()
        self.ledger.hear(replica_id, message)
        self._dispatcher.take_turn()  # as the event loop would next, if nobody else had news
        self.updates_s.append(time.thread_time() - started)

    def _hashes(self, count: int) -> list[BlockHash]:
        return [BlockHash(self._rng.randbytes(DIGEST_BYTES)) for _ in range(count)]

    def _stats(self, has_room: bool = False) -> ReplicaStats:
        total = 2 * self._load.num_blocks // self._load.num_replicas + BLOCKS_PER_CONVERSATION
        allocated = self._rng.randrange(total // 4)
        return ReplicaStats(
            time_s=0.0,
            block_size=BLOCK_SIZE,
            num_total_blocks=total,
            num_free_blocks=total - allocated,
            num_allocated_blocks=allocated,
            num_cached_blocks=total // 2,
            num_running=8,
            num_waiting=0,
            num_waiting_tokens=self._rng.randrange(512) if has_room or not self._load.num_held else 4 * 512,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            step_s=1 / STEPS_PER_S,
        )
