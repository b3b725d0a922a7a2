"""Both servers of a gateway, opened and closed together."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from fixtures.fake_gateway import FakeGateway
from fixtures.waiting import until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal_cluster.addresses import listen
from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.local_ray import free_ports
from shoal_cluster.gateway_settings import GatewaySettings
from shoal_cluster.serve import ingress as ingress_module
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.call_observer import CallObserver
from shoal_cluster.serve.codec import call_to_proto
from shoal_cluster.serve.ingress import Ingress
from shoal_cluster.serve.journal import Journal
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_cluster.serve.shared_port import is_other_gateway
from shoal_protos import generation_pb2_grpc
from shoal_replica.errors import ConfigError, Unavailable
from shoal_replica.sampling_params import SamplingParams

FREE = GatewaySettings(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0", drain_timeout_s=30)


def make_call(request_id: str = "a") -> GenerateCall:
    return GenerateCall(request_id=request_id, text="x", sampling_params=SamplingParams())


@asynccontextmanager
async def opened(core: FakeGateway, settings: GatewaySettings = FREE) -> AsyncIterator[Ingress]:
    ingress = await Ingress.open(core, settings)
    try:
        yield ingress
    finally:
        await ingress.close(asyncio.sleep(0))


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "UNREAD_S", 0.5)
    core = FakeGateway(text="a b c d e f g h i j " * 40)
    body = json.dumps({"prompt": "x", "stream": True, "n": 128, "logprobs": 20, "max_tokens": 400}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with opened(core) as ingress:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(client.connect, ("127.0.0.1", ingress.http_port))
            client.sendall(head % len(body) + body)
            await until(lambda: core.num_open == 1)
            await until(lambda: core.num_open == 0)
            assert core.num_closed_early == 1


async def test_the_work_of_a_call_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "UNREAD_S", 0.5)
    core = FakeGateway(text="a b c d e f g h i j " * 40)
    params = SamplingParams(n=128, logprobs=20, max_tokens=400)
    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with (
        opened(core, FREE.model_copy(update={"request_timeout_s": 0.5})) as ingress,
        grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}", options=small_window) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        stream = stub.Generate(call_to_proto(replace(make_call(), sampling_params=params)))
        await stream.read()
        await until(lambda: core.num_closed_early == 1)
        stream.cancel()


async def test_answers_under_way_are_finished_while_nothing_new_is_taken() -> None:
    core = FakeGateway()
    core.gate.clear()
    ingress = await Ingress.open(core, FREE)
    channel = GatewayClient(f"127.0.0.1:{ingress.grpc_port}")
    async with channel, httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.http_port}", timeout=30) as http:

        async def rpc() -> str:
            return "".join([chunk.text async for chunk in channel.generate(make_call())])

        body = {"prompt": "x", "stream": True}
        web = asyncio.create_task(http.post("/v1/completions", json=body))
        answers = asyncio.create_task(rpc())
        await until(lambda: core.num_open == 2)

        async def drained() -> None:
            await until(lambda: core.num_open == 0)

        closing = asyncio.create_task(ingress.close(drained()))
        await until(lambda: is_free(ingress.http_port) and is_free(ingress.grpc_port))
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as late:
                await late.get(f"http://127.0.0.1:{ingress.http_port}/healthz")
        assert core.num_open == 2
        assert not closing.done()
        core.gate.set()
        assert await answers == core.text
        assert (await web).text.endswith("data: [DONE]\n\n")
        await closing


def is_free(port: int) -> bool:
    try:
        listen(f"127.0.0.1:{port}").close()
    except OSError:
        return False
    return True


async def test_dashboards_and_health_watchers_hold_nothing_up() -> None:
    core = FakeGateway()
    ingress = await Ingress.open(core, FREE)
    base_url = f"http://127.0.0.1:{ingress.http_port}"
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}") as channel,
        httpx.AsyncClient(base_url=base_url, timeout=30) as http,
        http.stream("GET", "/dashboard/stream") as dashboard,
    ):
        lines = dashboard.aiter_lines()
        await anext(lines)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        started_s = time.monotonic()
        await ingress.close(asyncio.sleep(0))
        assert time.monotonic() - started_s < 15  # not the 35 s that answers would be given


async def test_a_call_that_comes_as_an_idle_gateway_closes_has_the_time_of_any_other() -> None:
    observer = make_observer()

    class Observed(FakeGateway):
        async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
            with observer.observe(call):
                async for chunk in super().generate(call):
                    yield chunk

    core = Observed()
    core.gate.clear()
    ingress = await Ingress.open(core, FREE)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.http_port}", timeout=30) as http:
        await http.get("/healthz")  # its connection is open
        closing = asyncio.create_task(ingress.close(observer.drain(30)))
        await asyncio.sleep(0)
        late = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: core.num_open == 1)
        ended, _ = await asyncio.wait((closing, late), timeout=ingress_module.LAST_BYTES_S + 0.5)
        assert not ended
        core.gate.set()
        assert (await late).json()["choices"][0]["text"] == core.text
        await closing


async def test_a_client_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "SHUTDOWN_S", 0.5)

    class Talker(FakeGateway):
        async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
            while True:
                yield Chunk(index=0, text="much " * 10_000)
                await asyncio.sleep(0)

    ingress = await Ingress.open(Talker(), FREE)
    reader, writer = await asyncio.open_connection("127.0.0.1", ingress.http_port, limit=1024)
    body = b'{"prompt": "x", "stream": true, "max_tokens": 1000000}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"\r\n")
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: any(connection.flow.write_paused for connection in connections(ingress)))
    async with asyncio.timeout(15):  # not the 35 s that answers would have
        await ingress.close(asyncio.sleep(0))
    writer.close()


def connections(ingress: Ingress) -> list[Any]:
    return list(ingress._http_server.server_state.connections)


async def test_an_address_in_use_is_named_and_nothing_stays_open() -> None:
    core = FakeGateway()
    async with opened(core) as ingress:
        taken = FREE.model_copy(update={"http_address": f"127.0.0.1:{ingress.http_port}"})
        with pytest.raises(ConfigError, match="http_address: cannot listen on"):
            await Ingress.open(core, taken)


async def test_a_connection_opened_just_before_the_end_has_its_call_answered() -> None:
    async with opened(FakeGateway()) as ingress:
        await until(lambda: ingress._http_server.started)
        reader, writer = await asyncio.open_connection("127.0.0.1", ingress.http_port)
        closing = asyncio.create_task(ingress.close(asyncio.sleep(0)))
        await asyncio.sleep(ingress_module.LAST_CALLS_S / 2)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", ingress.http_port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            await closing
        writer.close()


async def test_gateways_of_one_application_share_their_addresses() -> None:
    core = FakeGateway()
    async with opened(core) as first:
        addresses = {"grpc_address": f"127.0.0.1:{first.grpc_port}", "http_address": f"127.0.0.1:{first.http_port}"}
        shared = FREE.model_copy(update=addresses)
        second = await Ingress.open(core, shared, is_peer=lambda pid: True)
        await second.close(asyncio.sleep(0))
        with pytest.raises(ConfigError, match=f"grpc_address: cannot listen on .*: in use by process {os.getpid()}"):
            await Ingress.open(core, shared)


async def test_the_two_servers_of_a_gateway_share_no_port() -> None:
    (port,) = free_ports(1)
    both = {"grpc_address": f"127.0.0.1:{port}", "http_address": f"0.0.0.0:{port}"}
    with pytest.raises(ConfigError, match="http_address: cannot listen on"):
        await Ingress.open(FakeGateway(), FREE.model_copy(update=both), is_other_gateway("shoal", "Gateway"))


def make_observer() -> CallObserver:
    return CallObserver(GatewayMetrics("test", ("tiny",), LatencyWindow(LatencyTargets())), Journal())


async def test_calls_that_outlast_the_drain_are_told_why() -> None:
    observer = make_observer()
    await asyncio.wait_for(observer.drain(60), 5)
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def call() -> None:
        with observer.observe(make_call()) as watch:
            watch.fail = failed.set_result
            raise await failed

    running = asyncio.create_task(call())
    await until(lambda: observer._open)
    await asyncio.wait_for(observer.drain(0.05), 5)
    with pytest.raises(Unavailable, match=r"this gateway has stopped, and the answer was not finished within 0\.05 s"):
        await running
