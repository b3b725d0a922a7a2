"""Why a request went where it went: from this gateway's log, or from that of the gateway which decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal_cluster.serve.control_codec import records_from_bytes, records_to_bytes
from shoal_replica.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from shoal_cluster.policies.routing import RouteRecord
    from shoal_cluster.serve.route_log import RouteLog

ANSWER_TIMEOUT_S = 3.0


class Explainer:
    """Other gateways are asked by Serve's broadcast. That reaches all that run, this one too: it has nothing, or would
    not ask.

    Args:
        connect: gets the handle of the gateways' deployment, and may block; None where there is one gateway alone.
    """

    def __init__(self, routes: RouteLog, connect: Callable[[], DeploymentHandle] | None) -> None:  # type: ignore[type-arg]
        self._routes = routes
        self._connect = connect
        self._handle: DeploymentHandle | None = None  # type: ignore[type-arg]

    async def explain(self, request_id: str) -> Sequence[RouteRecord]:
        """See GatewayCore."""
        records = self._routes.of_request(request_id)
        if not records and self._connect is not None:
            records = await self._ask_others(request_id, self._connect)
        if not records:
            raise NotFound(f"request_id: no routing decision is kept for {request_id!r}")
        return records

    def kept(self, request_id: str) -> bytes:
        """What this gateway keeps, for another one."""
        return records_to_bytes(self._routes.of_request(request_id))

    async def _ask_others(self, request_id: str, connect: Callable[[], DeploymentHandle]) -> list[RouteRecord]:  # type: ignore[type-arg]
        answers: list[bytes | BaseException]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(connect)
                asked = self._handle.broadcast("kept_routes", request_id)
                answers = await asked.results_async(return_exceptions=True)
        except TimeoutError as error:
            answers = [error]
        records = [r for answer in answers if isinstance(answer, bytes) for r in records_from_bytes(answer)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and not records:
            reason = f"request_id: another gateway may keep {request_id!r} and does not answer now"
            raise Unavailable(reason) from failures[0]
        return sorted(records, key=lambda record: record.time_s)
