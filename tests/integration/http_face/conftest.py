"""The HTTP face over a scripted gateway: real uvicorn on loopback, one server for a module, as starting it is slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fixtures.fake_gateway import FakeGateway
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.serve.http.api import build_http_app

MAX_BODY_BYTES = 64 * 1024  # small enough to exceed


@pytest.fixture(scope="module")
def shared_core() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def core(shared_core: FakeGateway) -> FakeGateway:
    shared_core.reset()
    return shared_core


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_url(shared_core: FakeGateway) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_http_app(shared_core, MAX_BODY_BYTES), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.fixture
def url(shared_url: str, core: FakeGateway) -> str:
    return shared_url


@pytest_asyncio.fixture(loop_scope="module")
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        yield http
