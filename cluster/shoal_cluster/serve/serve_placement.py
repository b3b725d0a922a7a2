"""A request on its way: held by the dispatcher until its turn, then at its replica, as a leg follows it.

It goes there by the feed, which takes a fraction of a millisecond. Serve's call with the same request follows it, so
that Serve's accounting is true, and brings its outcome; see ``outcome``. The call takes some milliseconds of both
processes, so it lets the request's first step begin before, and in a burst other requests; see ``call_delay``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.pending import PendingRequest
from shoal_cluster.serve.call_delay import CallDelay
from shoal_cluster.serve.dispatcher import Dispatcher, Waiter
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.outcome import Outcome
from shoal_replica.request import Request

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponse


class ServePlacement:
    """One placement of ``request``. ``send`` is Serve's call; ``pending`` is the same as the queue sees it;
    ``call_delay`` is the gateway's.
    """

    def __init__(
        self,
        ledger: GatewayLedger,
        dispatcher: Dispatcher,
        request: Request,
        pending: PendingRequest,
        send: Callable[[Request], DeploymentResponse],
        call_delay: CallDelay,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._request = request
        self._pending = pending
        self._send = send
        self._call_delay = call_delay
        self._task: asyncio.Task[Outcome] | None = None
        self._take_back: Callable[[], None] | None = None  # from the replica that has it by its feed
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def outcome(self) -> asyncio.Future[Outcome]:
        """Let it go; if it is its turn at once, it is on its way when this returns. Raises what ends it here."""
        try:
            waiter = self._dispatcher.enter(self._pending)
        except BaseException:
            self._dispatcher.leave(self._pending)
            raise
        if waiter.turn.done():
            self._submit(waiter.turn.result())
        self._task = asyncio.get_running_loop().create_task(self._run(waiter))
        self._task.add_done_callback(partial(self._end, waiter))
        return self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._dispatcher.leave(self._pending)  # at once: its id may come again before the task has heard

    async def _run(self, waiter: Waiter) -> Outcome:
        if not waiter.turn.done():
            try:
                dispatch = await self._dispatcher.until_turn(self._pending, waiter)
            except BaseException:
                self._dispatcher.leave(self._pending)
                raise
            self._submit(dispatch)
        if self._take_back is not None:
            await self._call_delay.wait()
        response = self._send(self._request)
        self.sent.set_result(None)
        try:
            outcome: Outcome = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return outcome

    def _submit(self, dispatch: Dispatch) -> None:
        due_in_s = dispatch.due_s - time.monotonic()  # clocks of hosts differ: the replica counts from its own now
        hashes = self._pending.query.block_hashes
        self._request = replace(self._request, due_s=due_in_s, yields=dispatch.yields, block_hashes=hashes)
        self._take_back = self._ledger.submit(self._request, dispatch.decision.best)

    def _end(self, waiter: Waiter, task: asyncio.Task[Outcome]) -> None:
        """Also of a task that was cancelled before it began."""
        if not waiter.turn.done():
            self._dispatcher.leave(self._pending)
        if self._take_back is not None and (task.cancelled() or task.exception() is not None):
            self._take_back()  # nothing came of the call: the request is not to go on without it
