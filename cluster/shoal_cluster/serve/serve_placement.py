"""One placement of a request: held by the dispatcher until its turn, then sent to its replica, where a leg follows it.

It is sent on the feed, which takes a fraction of a millisecond. Serve's call with the same request follows where that
runs for longer than ``CALL_AFTER_S``, so that Serve counts it, and returns the outcome; see ``outcome``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.serve.dispatcher import Dispatcher, Waiter
from shoal_cluster.serve.feed_messages import BlockSource
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.outcome import Outcome
from shoal_replica.request import Request

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponse

CALL_AFTER_S = 1.0
"""A call takes the gateway and the replica half a millisecond each, a third of what a short request takes them, and
tells Serve nothing that matters of a request that is over by then: see ``ReplicaServer.__del__``.
"""


class ServePlacement:
    """One placement of ``request``. ``pending`` is the request as the queue sees it; ``send`` makes Serve's call."""

    def __init__(
        self,
        ledger: GatewayLedger,
        dispatcher: Dispatcher,
        request: Request,
        pending: PendingRequest,
        send: Callable[[Request, BlockSource | None], DeploymentResponse],
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._request = request
        self._pending = pending
        self._send = send
        self._task: asyncio.Task[Outcome] | None = None
        self._is_submitted = False
        self._submitted_to = ""
        self._source: BlockSource | None = None  # where more of its blocks are
        self._take_back: Callable[[], None] | None = None  # aborts it where it was submitted
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_called = False

    def start(self) -> asyncio.Future[Outcome]:
        """Enter the queue. If its turn comes at once, the request is on its way when this returns. Raises as ``enter``
        does.
        """
        try:
            waiter = self._dispatcher.enter(self._pending)
        except BaseException:
            self._dispatcher.leave(self._pending)
            raise
        if waiter.turn.done():
            self._submit(waiter.turn.result())
            self._is_submitted = True
        self._task = asyncio.get_running_loop().create_task(self._run(waiter))
        self._task.add_done_callback(partial(self._end, waiter))
        return self._task

    def cancel(self, *, has_ended: bool = False) -> None:
        if has_ended:
            self._take_back = None
        self._give_up()  # at once: its id may be reused before the task has ended
        if self._task is not None:
            self._task.cancel()
        self._dispatcher.leave(self._pending)

    async def _run(self, waiter: Waiter) -> Outcome:
        if not self._is_submitted:
            try:
                dispatch = await self._dispatcher.until_turn(self._pending, waiter)
            except BaseException:
                self._dispatcher.leave(self._pending)
                raise
            self._submit(dispatch)
        if self._take_back is not None:
            await asyncio.sleep(random.uniform(CALL_AFTER_S, 2 * CALL_AFTER_S))  # what came together is called apart
            if self._submitted_to not in self._ledger.view:
                await self._until_cancelled()
        return await self._call()

    async def _call(self) -> Outcome:
        """Serve's call. Once Serve has stopped the replica before the call went there, it is withdrawn."""
        response = self._send(self._request, self._source)
        self.is_called = True

        def withdraw() -> None:
            self.is_called = False
            response.cancel()

        if (sent := self._ledger.sent.get(self._request.request_id)) is not None:
            sent.withdraw_call = withdraw
        if not self.sent.done():
            self.sent.set_result(None)
        try:
            outcome: Outcome = await response
        except BaseException:
            task = asyncio.current_task()
            if not self.is_called and task is not None and not task.cancelling():
                await self._until_cancelled()
            response.cancel()
            raise
        return outcome

    async def _until_cancelled(self) -> NoReturn:
        """Serve lets nobody call the replica, where the request goes on: its leg cancels this."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets the result")

    def _submit(self, dispatch: Dispatch) -> None:
        due_in_s = dispatch.due_s - time.monotonic()  # hosts' clocks differ: the replica counts from its own now
        hashes = self._pending.query.block_hashes
        request = replace(self._request, due_s=due_in_s, yields=dispatch.yields, block_hashes=hashes)
        best, candidates = dispatch.decision.best, dispatch.candidates
        self._request = self._ledger.phases.as_sent(request, dispatch.pending.query, best, candidates)
        self._source = self._ledger.sources.of(self._pending.query, candidates, best)
        self._submitted_to, self._take_back = best, self._ledger.submit(self._request, best, self._source)
        if self._take_back is not None:
            self.sent.set_result(None)

    def _end(self, waiter: Waiter, task: asyncio.Task[Outcome]) -> None:
        """Clean up, also after a task that was cancelled before it began."""
        if not waiter.turn.done():
            self._dispatcher.leave(self._pending)
        if task.cancelled() or task.exception() is not None:
            self._give_up()  # the call has failed: the request must not go on without it

    def _give_up(self) -> None:
        """Abort the request where it was submitted, unless it has ended there."""
        if self._take_back is not None:
            take_back, self._take_back = self._take_back, None
            take_back()
