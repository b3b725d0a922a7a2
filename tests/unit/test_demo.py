"""The demo's chats, without a cluster."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest
from rich.console import Console

from shoal_cluster.commands import client, demo
from shoal_cluster.config import GatewaySettings
from shoal_replica.errors import ShoalError, Unavailable


class RefusingClient:
    def __init__(self, *args: object) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        pass

    async def generate(self, call: object) -> AsyncIterator[object]:
        raise ShoalError("messages: the model has no chat template")
        yield


def test_chats_that_all_fail_end_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio has nothing to add to the first one, as it does about tasks whose error nobody asked for."""
    monkeypatch.setattr(client, "GatewayClient", RefusingClient)
    complaints: list[dict[str, Any]] = []

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        chats = [demo.Chat(question, "demo") for question in demo.QUESTIONS]
        with pytest.raises(ShoalError, match="no chat template"):
            await demo._ask_all(GatewaySettings(), chats, Console(quiet=True))
        del chats
        gc.collect()

    asyncio.run(ask())
    gc.collect()
    assert complaints == []


def printed(monkeypatch: pytest.MonkeyPatch, gateway: GatewaySettings) -> str:
    monkeypatch.setattr(demo.shutil, "which", lambda name: f"/bin/{name}")
    return demo._addresses(gateway, demo.Chat("Why?", "demo-1"), None)


def test_every_command_that_is_printed_reaches_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"grpc_address": "127.0.0.1:9100", "http_address": "127.0.0.1:8100"}
    told = printed(monkeypatch, GatewaySettings(**others))
    for command in ('generate "Why is the sky blue?"', "chat", "status", "explain demo-1", "tune --max-replicas 3"):
        assert f"shoal {command} --address 127.0.0.1:9100\n" in told
    assert "shoal top --address 127.0.0.1:8100\n" in told
    safe = printed(monkeypatch, GatewaySettings(**others, tls_cert="cert.pem", tls_key="key.pem"))
    assert "shoal status --address https://127.0.0.1:9100\n" in safe
    assert "shoal top --address https://127.0.0.1:8100\n" in safe
    assert "--address" not in printed(monkeypatch, GatewaySettings())


def test_a_gateway_with_keys_is_told_of_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = printed(monkeypatch, GatewaySettings(api_keys={"alice": "sk-a"}))
    assert "SHOAL_API_KEY must be one of the gateway's" in told
    assert "sk-a" not in told
    assert "SHOAL_API_KEY" not in printed(monkeypatch, GatewaySettings())


def test_a_demo_whose_ray_has_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits with signals blocked, which its caller's thread must not stay."""

    class DeadRay:
        def check(self) -> None:
            raise Unavailable("Ray has ended; it said last:")

    monkeypatch.setattr(demo, "LOOK_S", 0.01)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    try:
        with pytest.raises(Unavailable, match="Ray has ended"):
            demo._wait_for_interrupt(DeadRay())  # type: ignore[arg-type]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
