"""A request on its way: held by the dispatcher until its turn, then at its replica, as a leg follows it.

It goes there by the feed, which takes a fraction of a millisecond. Serve's call with the same request follows it, so
that Serve's accounting is true, and brings its outcome; see ``outcome``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal_cluster.policies.pending import PendingRequest
from shoal_cluster.serve.dispatcher import Dispatcher
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.outcome import Outcome
from shoal_replica.request import Request

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponse


class ServePlacement:
    """One placement of ``request``. ``send`` is Serve's call; ``pending`` is the same as the queue sees it."""

    def __init__(
        self,
        ledger: GatewayLedger,
        dispatcher: Dispatcher,
        request: Request,
        pending: PendingRequest,
        send: Callable[[Request], DeploymentResponse],
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._request = request
        self._pending = pending
        self._send = send
        self._task: asyncio.Task[Outcome] | None = None
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def outcome(self) -> asyncio.Future[Outcome]:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Outcome:
        dispatch = await self._dispatcher.wait(self._pending)
        due_in_s = dispatch.due_s - time.monotonic()  # clocks of hosts differ: the replica counts from its own now
        query, yields = self._pending.query, dispatch.yields
        request = replace(self._request, due_s=due_in_s, yields=yields, block_hashes=query.block_hashes)
        take_back = self._ledger.submit(request, dispatch.decision.best)
        try:
            return await self._call(request)
        except BaseException:  # cancelled, or nothing came of the call: the request is not to go on without it
            take_back()
            raise

    async def _call(self, request: Request) -> Outcome:
        response = self._send(request)
        self.sent.set_result(None)
        try:
            outcome: Outcome = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return outcome
