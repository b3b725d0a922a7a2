"""The dashboard's routes: the page and its files, live updates, the timelines' past, and full routing records.

The page asks nothing of any other host, and its content security policy says so to the browser.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from shoal_cluster.serve.call import GatewayCore
from shoal_cluster.serve.dashboard.broadcast import Broadcast
from shoal_cluster.serve.dashboard.history import COARSE_S, SAMPLE_PERIOD_S, History, Sample
from shoal_cluster.serve.dashboard.meter import Meter
from shoal_cluster.serve.dashboard.update import NUM_ROUTES, build_update, encode_route, encode_update
from shoal_cluster.serve.http_stream import EventStream, error_response
from shoal_replica.errors import NotFound

UPDATE_PERIOD_S = 0.5
REDIAL_MS = 1000
FOLDER = Path(str(files("shoal_cluster.serve.dashboard")))
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", "": "text/plain"}
STATIC = (
    "theme.js",
    "dashboard.js",
    "format.js",
    "replicas.js",
    "routes.js",
    "charts.js",
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


class Dashboard:
    """The page's state in a gateway. All of it belongs to one event loop."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core
        self._meter = Meter()
        self.history = History()
        self.broadcast = Broadcast(self._event, UPDATE_PERIOD_S)

    def update(self) -> bytes:
        """The cluster as it is now, as JSON."""
        cluster, routes = self._core.cluster(), self._core.recent_routes(NUM_ROUTES)
        return encode_update(build_update(cluster, routes, self._meter.rates(), self.history.latest, time.time()))

    async def keep_history(self) -> None:
        """Sample the cluster until cancelled, viewers or not: what happened is looked at afterwards."""
        while True:
            sample = self._meter.observe(self._core.cluster(), time.monotonic(), time.time())
            if sample is not None:
                self.history.add(sample)
            await asyncio.sleep(SAMPLE_PERIOD_S)

    def _event(self) -> bytes:
        return b"event: update\ndata: " + self.update() + b"\n\n"


def dashboard_router(core: GatewayCore) -> APIRouter:
    """The routes under ``/dashboard``. History is kept while the application's lifespan runs."""
    dashboard = Dashboard(core)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(dashboard.keep_history(), name="shoal-history")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

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
        return Response(dashboard.update(), media_type="application/json", headers=HEADERS)

    @router.get("/stream")
    async def stream(request: Request) -> Response:
        return EventStream(_with_redial(dashboard.broadcast), request.state.request_id)

    @router.get("/history")
    async def history(seconds: float = COARSE_S) -> Response:
        samples = dashboard.history.since(time.time() - seconds)
        return Response(_columns(samples), media_type="application/json", headers=HEADERS)

    @router.get("/routes/{request_id}")
    async def route(request_id: str, request: Request) -> Response:
        try:
            records = core.explain(request_id.partition("#")[0])
        except NotFound as error:
            return error_response(error, request.state.request_id)
        return JSONResponse([encode_route(record) for record in records], headers=HEADERS)

    return router


async def _with_redial(broadcast: Broadcast) -> AsyncGenerator[bytes, None]:
    """The shared events, after the time that a browser should wait before it dials again."""
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
    """One list a field: a fifth of the size of one object a sample."""
    columns = {
        name: [round(value, 3) for value in (getattr(s, name) for s in samples)] for name in Sample.__struct_fields__
    }
    return msgspec.json.encode(columns)
