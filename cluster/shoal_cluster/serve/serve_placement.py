"""A call to a replica through a Serve handle, as a leg follows it."""

from __future__ import annotations

import asyncio

from ray.serve.handle import DeploymentResponse

from shoal_cluster.serve.outcome import Outcome


class ServePlacement:
    """A request in Serve's hands."""

    def __init__(self, response: DeploymentResponse) -> None:
        self._response = response

    def outcome(self) -> asyncio.Future[Outcome]:
        return asyncio.ensure_future(self._result())

    def cancel(self) -> None:
        self._response.cancel()

    async def _result(self) -> Outcome:
        outcome: Outcome = await self._response
        return outcome
