"""All gateways of the application, reached through Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from shoal_cluster.serve.deployment_watch import read_deployment
from shoal_cluster.serve.serve_details import serve_details
from shoal_replica.errors import Unavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ASKED = "told_of_request"
"""Name of the gateway's method that answers."""


class ServeGateways:
    """Implements the Explainer's ``Gateways``. Serve's broadcast reaches all gateways that run."""

    def __init__(self, app_name: str, deployment: str) -> None:
        self._app_name = app_name
        self._deployment = deployment
        self._handle: DeploymentHandle | None = None

    async def ask(self, request_id: str) -> Sequence[Coroutine[object, object, tuple[str, bytes]]]:
        """See Gateways."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(serve.get_deployment_handle, self._deployment, self._app_name)
            handle: DeploymentHandle = self._handle
            # Not ``results_async``: it returns all answers together, so one gateway that hangs holds up the others'.
            asked = await handle.broadcast(ASKED, request_id)._fetch_replica_results_async()
        # RuntimeError: the handle is not ready. AttributeError: this version of Serve has no such method.
        except (RayError, RayServeException, RuntimeError, AttributeError) as error:
            raise Unavailable(f"Serve does not reach the other gateways: {error}") from error
        return [each.get_async() for each in asked]

    async def names(self) -> Sequence[str]:
        """See Gateways. These are Serve's ids of the gateways that run."""
        row = read_deployment(await serve_details(), self._app_name, self._deployment)
        return [replica.replica_id for replica in row.replicas if replica.state == "RUNNING"] if row is not None else []
