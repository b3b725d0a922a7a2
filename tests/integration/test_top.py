"""``shoal top`` over a scripted cluster: the dashboard's numbers in a terminal of any size."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import pytest
from fixtures.fake_core import FakeCore
from fixtures.live_cluster import free_address
from fixtures.served_core import serving
from rich.console import Console
from typer.testing import CliRunner

from shoal_cluster.cli import app
from shoal_cluster.commands import top
from shoal_cluster.commands.gateway_access import GatewayAccess
from shoal_cluster.commands.top_screen import Past, screen
from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.dashboard.state import DashboardState
from shoal_cluster.serve.dashboard.update import Update


def still() -> FakeCore:
    core = FakeCore()
    now = core.started_s
    core.started_s -= 100.0
    core.clock = lambda: now
    return core


def lines(update: Update, width: int, height: int | None, trouble: str = "") -> list[str]:
    console = Console(width=width, color_system=None)
    past = Past(deque([Sample(time_s=float(i), utilization=i / 100) for i in range(100)]))
    with console.capture() as capture:
        console.print(screen(update, past, trouble, width, height))
    return capture.get().splitlines()


@pytest.fixture
def update() -> Update:
    return msgspec.json.decode(DashboardState(still()).update(), type=Update)


async def test_once_prints_what_the_cluster_says() -> None:
    core, address = still(), free_address()
    async with serving(core, address):
        arguments = ["top", "--once", "--address", address]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for row in core.cluster().replicas:
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(row.replica_id)]
        assert row.stats is not None
        words = line.split()
        assert words[1] == "ready"
        assert f"{row.stats.num_running}/64" in words
        assert f"{row.stats.utilization:.0%}" in words
    scaling = core.scaling()
    assert scaling.current is not None
    assert f"{scaling.current.num_after} wanted of 2 to 6 {scaling.current.reason}" in result.stdout
    assert core.events(1)[0].text in result.stdout
    assert core.recent_routes(1)[0].query.request_id in result.stdout


def test_nobody_there_is_said_in_one_line() -> None:
    result = CliRunner().invoke(app, ["top", "--address", free_address()])
    assert result.exit_code == 1
    assert "no Shoal gateway at http://127.0.0.1:" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["[::1", "a]b:80", "℀:8000"])
def test_what_is_no_address_is_said_in_one_line(address: str) -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--address", address])
    assert result.exit_code == 1
    assert "no Shoal gateway at http://" in result.stderr
    assert result.stderr.count("\n") == 1


async def test_another_server_is_said_to_be_none_of_ours() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n<html>")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        result = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once", "--address", address])
    assert result.exit_code == 1
    assert result.stderr.endswith("answers something else: is it a Shoal gateway?\n")
    assert result.stderr.count("\n") == 1


async def test_a_broken_stream_is_said_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "REDIAL_S", 0.05)
    address = free_address()
    news = top._updates(f"http://{address}/dashboard/stream", GatewayAccess())
    async with serving(FakeCore(), address):
        first = await asyncio.to_thread(next, news)
        assert isinstance(first, Update)
        assert first.model == "smollm2-135m-instruct"
    async with asyncio.timeout(20):
        while isinstance(said := await asyncio.to_thread(next, news), Update):
            pass
        assert "reconnecting" in said
        async with serving(FakeCore(), address):
            while not isinstance(await asyncio.to_thread(next, news), Update):
                pass
    news.close()


@pytest.mark.parametrize(("width", "height"), [(80, 40), (100, 36), (200, 60)])
def test_a_screen_fits_its_terminal(update: Update, width: int, height: int) -> None:
    many = replace_rows(update, 200)
    shown = lines(many, width, height)
    assert max(map(len, shown)) <= width
    assert len(shown) <= height
    assert any("more" in line for line in shown)
    assert any("broken" in line for line in lines(many, width, height, trouble="the stream is broken; reconnecting"))


def replace_rows(update: Update, count: int) -> Update:
    rows = (update.replicas * count)[:count]
    return msgspec.structs.replace(update, replicas=rows)


def test_an_empty_cluster_has_a_screen_too() -> None:
    core = still()
    core.num_replicas = 0
    update = msgspec.json.decode(DashboardState(core).update(), type=Update)
    quiet = msgspec.structs.replace(update, replicas=(), routes=(), events=(), latency=None, hit_rate=None)
    shown = "\n".join(lines(quiet, 120, 40))
    assert "no request has been routed yet" in shown
    assert "–" in shown
