"""Why a request went where it went, waits or was refused: as this gateway knows, or the one that decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.explanation_codec import explanation_from_bytes, explanation_to_bytes
from shoal_replica.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ANSWER_TIMEOUT_S = 3.0


class Explainer:
    """Other gateways are asked by Serve's broadcast, which reaches all that run, this one too. They are asked where
    nothing is known here but a refusal: a client that tries again may meet another gateway.

    Args:
        known: what this gateway has of a request.
        connect: gets the handle of the gateways' deployment, and may block; None where there is one gateway alone.
    """

    def __init__(self, known: Callable[[str], Explanation], connect: Callable[[], DeploymentHandle] | None) -> None:
        self._known = known
        self._connect = connect
        self._handle: DeploymentHandle | None = None

    async def explain(self, request_id: str) -> Explanation:
        """See GatewayCore."""
        explanation = self._known(request_id)
        if not (explanation.records or explanation.held) and self._connect is not None:
            try:
                explanation = await self._ask_others(request_id, self._connect) or explanation
            except Unavailable:
                if not explanation:
                    raise
        if not explanation:
            raise NotFound(f"request_id: no routing decision is kept for {request_id!r}")
        return explanation

    def told(self, request_id: str) -> bytes:
        """What this gateway has, for another one."""
        return explanation_to_bytes(self._known(request_id))

    async def _ask_others(self, request_id: str, connect: Callable[[], DeploymentHandle]) -> Explanation:
        answers: list[bytes | BaseException]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(connect)
                handle: DeploymentHandle = self._handle
                asked = handle.broadcast("told_of_request", request_id)
                answers = await asked.results_async(return_exceptions=True)
        except (TimeoutError, RuntimeError) as error:  # Ray's, where a handle is not ready
            answers = [error]
        explanation = Explanation.of([explanation_from_bytes(told) for told in answers if isinstance(told, bytes)])
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and not explanation:
            reason = f"request_id: another gateway may know of {request_id!r} and does not answer now"
            raise Unavailable(reason) from failures[0]
        return explanation
