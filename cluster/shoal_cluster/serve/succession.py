"""The change from a gateway to its successor at the same addresses: at any time one of them accepts calls.

Serve stops a gateway that it replaces and starts the next at once. Both listen (SO_REUSEPORT) until the next one runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from shoal_cluster.serve.deployment_watch import CONTROLLER_TIMEOUT_S, DeploymentRow, read_deployment
from shoal_replica.errors import Unavailable

OVERLAP_S = 30.0
"""The longest that a gateway which is to stop goes on accepting calls while its successor starts."""

LOOK_S = 0.25


class Succession:
    """One gateway's part.

    Args:
        ask: returns Serve's instance details. Raises Unavailable if they cannot be had now.
        own_id: Serve's id of this gateway.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Mapping[str, Any]]], application: str, deployment: str, own_id: str
    ) -> None:
        self._ask = ask
        self._names = (application, deployment)
        self._own_id = own_id

    async def has_peers(self) -> bool:
        """Whether there are other gateways of the application, which may listen at the same addresses."""
        row = await self._row()
        return row is not None and bool(self._states(row))

    async def until_succeeded(self) -> None:
        """Return when another gateway runs or none is to come, after ``OVERLAP_S`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OVERLAP_S):
                while await self._is_awaited():  # noqa: ASYNC110 - Serve does not call us
                    await asyncio.sleep(LOOK_S)

    async def _is_awaited(self) -> bool:
        row = await self._row()
        return row is not None and row.num_wanted > 0 and "RUNNING" not in self._states(row)

    async def _row(self) -> DeploymentRow | None:
        """None if the application is gone, or Serve does not tell."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(CONTROLLER_TIMEOUT_S):
                return read_deployment(await self._ask(), *self._names)
        return None

    def _states(self, row: DeploymentRow) -> list[str]:
        return [replica.state for replica in row.replicas if replica.replica_id != self._own_id]
