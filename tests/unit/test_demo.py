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
