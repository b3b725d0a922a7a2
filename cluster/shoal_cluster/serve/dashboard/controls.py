"""What an administrator may change from the page. Every route here needs the admin key; all other routes only read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from pydantic import Strict
from starlette.responses import JSONResponse

from shoal_cluster.serve.admin import key_of_header
from shoal_cluster.serve.dashboard.scaling import limits, scaling_now
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.access import all_of
from shoal_cluster.serve.http.errors import error_response
from shoal_replica.errors import ShoalError


def controls_router(core: GatewayCore) -> APIRouter:
    """The routes under ``controls``."""
    router = APIRouter(prefix="/controls")

    def check(request: Request) -> None:
        core.check_admin(key_of_header(all_of(request.headers, "authorization")))

    @router.get("")
    async def controls(request: Request) -> Response:
        """Whether the key is right, and the limits within which each setting may be changed."""
        try:
            check(request)
        except ShoalError as error:
            return error_response(error, request.state.request_id)
        return JSONResponse({"limits": limits()})

    @router.post("/tune")
    async def tune(
        request: Request,
        changes: Annotated[dict[str, Annotated[float, Strict()]], Body(embed=True)],
        reset: Annotated[bool, Body(embed=True)] = False,
    ) -> Response:
        """Change settings of the autoscaler in place. Answers with those in force."""
        try:
            check(request)
            row = await core.tune(changes, reset=reset)
        except ShoalError as error:
            return error_response(error, request.state.request_id)
        told = scaling_now(row, 0)
        return JSONResponse({"settings": told.settings, "tuned": list(told.tuned)})

    @router.post("/drain/{replica_id}")
    async def drain(replica_id: str, request: Request) -> Response:
        """Let a replica finish its requests and be replaced."""
        try:
            check(request)
            await core.drain(replica_id)
        except ShoalError as error:
            return error_response(error, request.state.request_id)
        return JSONResponse({"replica_id": replica_id, "state": "draining"})

    return router
