"""Holds requests at the gateway until a replica can start them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.named_placement import NamedPlacement
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest, QueuePlace
from shoal_cluster.serve.admission_desk import AdmissionDesk
from shoal_cluster.serve.explanation import Explanation, HeldRequest
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.request_id import call_of

MIN_WAKE_S = 0.001
"""Margin after a deadline at which to wake up, so that it has certainly passed."""

LOOK_S = 1.0
"""How often a held request checks, while no replica takes requests, whether one will come."""

NUM_LOOKS = 4
"""A held request checks whether there is a replica at least this many times per ``patience_s``."""

MAX_TOLD = 64
"""How much of the queue is shown to a client that asks where its request stands."""

FEED_DELAY_S = 0.005
"""Time until the other gateways know of a promise: a hop to the replica, ``feed.GATHER_S``, and a hop back."""


@dataclass(slots=True)
class Waiter:
    """A request in the queue; ``turn`` is done when its turn has come."""

    pending: PendingRequest
    turn: asyncio.Future[Dispatch]


class Dispatcher:
    """Holds requests in a PendingQueue and looks at it again whenever the ledger has news.

    Args:
        holding: context entered while a request is held, with its prompt tokens: it tells the autoscaler.
        patience_s: how long a request is held while no replica could ever take it and none is starting.
        is_growing: whether replicas are starting, as far as is known; a request that waits for one is held until its
            own deadline.
        start_failure: why replicas fail to start, empty while one may still come up. Once it is set and there is no
            replica, requests are refused rather than held.
    """

    def __init__(
        self,
        ledger: GatewayLedger,
        hold: HoldConfig,
        limits: AdmissionLimits,
        holding: Callable[[int], AbstractContextManager[None]],
        patience_s: float,
        is_growing: Callable[[], bool],
        start_failure: Callable[[], str],
    ) -> None:
        self._ledger = ledger
        self._queue = PendingQueue(hold, ledger.num_gateways > 1)
        self.desk = AdmissionDesk(ledger, self._queue, limits)
        self._turn: asyncio.TimerHandle | None = None
        self._has_news = False  # and a look at them is to come
        self._rested_s = -math.inf  # it comes no sooner
        self._holding = holding
        self._patience_s = patience_s
        self._is_growing = is_growing
        self._start_failure = start_failure
        self._rng = random.Random()
        self._waiters: dict[str, Waiter] = {}
        ledger.on_news = self._hear
        ledger.phases.take_from(self._queue, hold.objective.ttft_s)

    @property
    def num_held(self) -> int:
        """Number of requests held here."""
        return len(self._queue)

    @property
    def num_held_tokens(self) -> int:
        """Prompt tokens that the held requests have to compute."""
        return self._queue.num_tokens

    def explain(self, request_id: str) -> Explanation:
        """All that this gateway knows of a client's request."""
        return replace(self._ledger.routes.of_request(request_id), held=self._held(request_id))

    async def until_turn(self, pending: PendingRequest, waiter: Waiter) -> Dispatch:
        """Return when it is the turn of a request that has entered, with room for it reserved. The caller must let it
        ``leave`` afterwards.

        Raises (for a resumed request, only Unavailable):
            InvalidArgument: the replicas that had enough blocks have left.
            ResourceExhausted: no replica can start it any more within the objective, where the limits have one, or
                before its deadline.
            DeadlineExceeded: its deadline was too short: even an idle replica could not have met it.
            Unavailable: there was no replica for ``patience_s`` and none was starting, or those that were starting
                have failed.
        """
        if waiter.turn.done():
            return waiter.turn.result()
        with self._holding(pending.query.num_prompt_tokens):
            return await self._until(waiter.turn, pending)

    def leave(self, pending: PendingRequest) -> None:
        """Drop a request that has had its turn or gives it up. Idempotent; another request of the same id stays."""
        request_id = pending.query.request_id
        waiter = self._waiters.get(request_id)
        if waiter is not None and waiter.pending is pending:
            del self._waiters[request_id]
            self._queue.remove(request_id)
            self._ledger.wish(self._queue.wishes())

    def enter(self, pending: PendingRequest) -> Waiter:
        """Put a request in the queue. If a replica can start it, its turn comes at once, or after other gateways'.

        A request that must not be held is refused here, before the next one of a burst enters and counts it. If it may
        stay and the queue is full, the last request in order has to go instead.

        Raises (not for a request that has been placed before):
            InvalidArgument: no replica has enough blocks.
            ResourceExhausted: every replica's queue is full, or too much waits for a first replica.
        """
        waiter = Waiter(pending, asyncio.get_running_loop().create_future())
        self._queue.push(pending)
        self._waiters[pending.query.request_id] = waiter
        self.take_turn()
        if not (waiter.turn.done() or pending.is_admitted):
            self.desk.check_newcomer(pending)
            self._push_out(pending)
        return waiter

    def _push_out(self, newcomer: PendingRequest) -> None:
        """End the last request if too much is held; raises what the newcomer's client is told if that is the last."""
        if (overflow := self.desk.overflow()) is None:
            return
        last, error = overflow
        if last is newcomer:
            raise error
        request_id = last.query.request_id
        self._queue.remove(request_id)
        turn = self._waiters.pop(request_id).turn
        turn.set_exception(error)
        turn.exception()  # nobody may be left to hear it

    def _hear(self) -> None:
        """The ledger has news: one look for all that is there by then. While looks send nothing, they may take half of
        the loop's time: tokens go through it, too.
        """
        if not self._has_news and (self._waiters or self._ledger.num_gateways > 1):
            self._has_news = True
            rest_s = max(0.0, self._rested_s - time.monotonic())
            asyncio.get_running_loop().call_later(rest_s, self._look_at_news)

    def _look_at_news(self) -> None:
        self._has_news = False
        self.take_turn()

    def take_turn(self) -> None:
        """Send what can start now; several gateways take turns, so that they do not all look at once."""
        ledger = self._ledger
        if self._turn is not None:
            return
        num_delays = self._queue.turn(ledger.view, ledger.num_gateways, time.monotonic(), self._rng)
        if num_delays == 0:
            self.dispatch()
        else:
            self._turn = asyncio.get_running_loop().call_later(num_delays * FEED_DELAY_S, self.dispatch)

    def dispatch(self) -> None:
        """Send what can start now, and tell the other gateways what stays held."""
        self._turn = None
        if not self._waiters and self._ledger.num_gateways == 1:
            return
        began_s, num_held = time.monotonic(), len(self._queue)
        self._send_startable()
        self._ledger.wish(self._queue.wishes())
        ended_s = time.monotonic()
        self._rested_s = 2 * ended_s - began_s if len(self._queue) == num_held else ended_s

    def _held(self, request_id: str) -> tuple[HeldRequest, ...]:
        """The held requests of a client's request: the call of that id, or its calls if it had several prompts."""
        now, time_s = time.monotonic(), time.time()
        found = []
        for pending in self._queue:
            name = pending.query.request_id
            call_id = call_of(name)
            request, _, number = call_id.rpartition("-")
            if call_id == request_id or (request == request_id and number.isdecimal()):
                queue, count = self._queue.up_to(name, now, MAX_TOLD)
                told = tuple(map(self._present, queue))
                found.append(HeldRequest(time_s, name, now - pending.arrival_s, count, self.num_held, told))
        return tuple(found)

    def _present(self, place: QueuePlace) -> QueuePlace:
        """``place``, without its replica if that has left since the look that planned it."""
        is_there = place.replica_id in self._ledger.view.replica_ids
        return place if is_there else place._replace(replica_id="")

    def _send_startable(self) -> None:
        ledger = self._ledger
        if ledger.named is not None:
            self._send_all(ledger.named)
        while self._waiters and ledger.named is None:
            dispatch = self._queue.next(ledger.view, ledger.weights, time.monotonic(), self._rng)
            if dispatch is None:
                return
            ledger.commit(dispatch)
            self._waiters.pop(dispatch.pending.query.request_id).turn.set_result(dispatch)

    def _send_all(self, named: NamedPlacement) -> None:
        """Place everything by another system's rule: such rules do not wait for a replica that can start."""
        ledger = self._ledger
        for pending in tuple(self._queue):
            dispatch = named.dispatch(pending, ledger.view, ledger.weights, time.monotonic(), self._rng)
            if dispatch is not None:
                request_id = pending.query.request_id
                self._queue.remove(request_id)
                ledger.commit(dispatch)
                self._waiters.pop(request_id).turn.set_result(dispatch)

    async def _until(self, turn: asyncio.Future[Dispatch], pending: PendingRequest) -> Dispatch:
        """Wait for the turn, as long as there is a replica to wait for and the objective can be met."""
        loop = asyncio.get_running_loop()
        alone_since_s = math.inf
        is_first = True  # ``enter`` has just checked it; later, replicas may have joined or left
        while True:
            left_s = self.desk.time_left_s(pending)
            if not (is_first or pending.priority == RESUMED_PRIORITY):  # a replica that can hold that may come back
                self.desk.check_size(pending)
            is_first = False
            is_alone = not self.desk.can_take(pending)
            alone_since_s = min(alone_since_s, loop.time()) if is_alone else math.inf
            if is_alone and (failure := self._start_failure()):
                raise self.desk.unavailable(pending, f"no replica could be started: {failure}")
            if alone_since_s + self._patience_s <= loop.time():
                if not self._is_growing():
                    raise self.desk.unavailable(pending, "no replica became ready in time")
                alone_since_s = loop.time()
            look_s = min(LOOK_S, alone_since_s + self._patience_s - loop.time()) if is_alone else math.inf
            await asyncio.wait([turn], timeout=min(left_s + MIN_WAKE_S, self._patience_s / NUM_LOOKS, look_s))
            if turn.done():
                return turn.result()
