"""The dashboard's routes: the page and its files, live updates, the timelines' past, and full records of decisions.

The page requests nothing from any other host, and its content security policy has the browser enforce that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from shoal_cluster.serve.dashboard.broadcast import Broadcast
from shoal_cluster.serve.dashboard.controls import controls_router
from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.dashboard.records import encode_explanation
from shoal_cluster.serve.dashboard.scaling import encode_decision, mark
from shoal_cluster.serve.dashboard.state import DashboardState
from shoal_cluster.serve.dashboard.update import rounded_sample
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.errors import error_response
from shoal_cluster.serve.http.stream import EventStream
from shoal_cluster.serve.past_sample import PAST_S
from shoal_cluster.serve.request_id import call_of
from shoal_replica.errors import NotFound, ShoalError

UPDATE_PERIOD_S = 0.5
REDIAL_MS = 1000
MAX_EVENTS = 500
FOLDER = Path(str(files("shoal_cluster.serve.dashboard")))
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", "": "text/plain"}
STATIC = (
    "theme.js",
    "dashboard.js",
    "stream.js",
    "format.js",
    "strip.js",
    "pool.js",
    "replicas.js",
    "heat.js",
    "routes.js",
    "charts.js",
    "marks.js",
    "models.js",
    "events.js",
    "log.js",
    "dialog.js",
    "controls.js",
    "base.css",
    "dashboard.css",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
    "vendor/LICENSE",
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_router(core: GatewayCore) -> APIRouter:
    """The routes under ``/dashboard``. History is kept while the application's lifespan runs."""
    state = DashboardState(core)
    broadcast = Broadcast(lambda: b"event: update\ndata: " + state.update() + b"\n\n", UPDATE_PERIOD_S)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(state.keep_history(), name="shoal-history"),
            asyncio.create_task(state.recall_past(), name="shoal-recall"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    router = APIRouter(prefix="/dashboard", include_in_schema=False, lifespan=lifespan)

    @router.get("")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/static/{name:path}")
    async def static(name: str) -> Response:
        if name not in STATIC:
            raise HTTPException(404, f"the dashboard has no file {name!r}")
        return _file(name)

    @router.get("/data")
    async def data() -> Response:
        return Response(state.update(), media_type="application/json", headers=HEADERS)

    @router.get("/stream")
    async def stream(request: Request) -> Response:
        return EventStream(_with_redial(broadcast), request.state.request_id)

    @router.get("/history")
    async def history(seconds: float = PAST_S) -> Response:
        samples = state.history.since(time.time() - seconds)
        return Response(_columns(samples), media_type="application/json", headers=HEADERS)

    @router.get("/events")
    async def events() -> Response:
        body = msgspec.json.encode(core.events(MAX_EVENTS))
        return Response(body, media_type="application/json", headers=HEADERS)

    @router.get("/decisions")
    async def decisions() -> Response:
        body = msgspec.json.encode([mark(record) for record in core.scaling().records])
        return Response(body, media_type="application/json", headers=HEADERS)

    @router.get("/decisions/{seq}")
    async def decision(seq: int, request: Request) -> Response:
        found = [record for record in core.scaling().records if record.seq == seq]
        if not found:
            return error_response(NotFound(f"seq: no decision {seq} is kept"), request.state.request_id)
        return JSONResponse(encode_decision(found[0]), headers=HEADERS)

    @router.get("/routes/{request_id:path}")
    async def route(request_id: str, request: Request) -> Response:
        try:
            explanation = await core.explain(call_of(request_id))
        except ShoalError as error:
            return error_response(error, request.state.request_id)
        return JSONResponse(encode_explanation(explanation), headers=HEADERS)

    @router.get("/replicas/{replica_id}/blocks")
    async def blocks(replica_id: str, request: Request) -> Response:
        try:
            found = await state.block_map(replica_id)
        except ShoalError as error:
            return error_response(error, request.state.request_id)
        return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)

    router.include_router(controls_router(core))
    return router


async def _with_redial(broadcast: Broadcast) -> AsyncGenerator[bytes, None]:
    """The shared events, preceded by how long a browser should wait before it reconnects."""
    yield f"retry: {REDIAL_MS}\n\n".encode()
    events = broadcast.events()
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()


def _file(name: str) -> Response:
    return FileResponse(FOLDER / name, media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)


def _columns(samples: list[Sample]) -> bytes:
    """One list per field: a fifth of the size of one object per sample."""
    rounded = [rounded_sample(sample) for sample in samples]
    return msgspec.json.encode({name: [getattr(s, name) for s in rounded] for name in Sample.__struct_fields__})
