"""Adapters that come and go, as a gateway sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fixtures.waiting import until

from shoal_cluster.serve import served_adapters
from shoal_cluster.serve.journal import Journal
from shoal_cluster.serve.replica_adapters import Told, Wanted
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import Unavailable


class Ledger:
    """Replicas that answer what they are told to."""

    def __init__(self, **told: Told | None) -> None:
        self.told = told
        self.journal = Journal()
        self.asked: list[dict[str, str]] = []

    @property
    def view(self) -> Any:
        return SimpleNamespace(replica_ids=tuple(self.told))

    async def ask(self, replica_id: str, question: str, body: bytes) -> bytes:
        self.asked.append(msgspec.msgpack.decode(body, type=Wanted).sources)
        if (answer := self.told[replica_id]) is None:
            raise Unavailable("its feed is not connected")
        return msgspec.msgpack.encode(answer)


@asynccontextmanager
async def serving(ledger: Ledger) -> AsyncIterator[ServedAdapters]:
    adapters = ServedAdapters(ledger, ["deployed"])  # type: ignore[arg-type]
    task = asyncio.create_task(adapters.run())
    try:
        yield adapters
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_adapters, "POLL_S", 0.01)


def can_ask(adapters: ServedAdapters, name: str) -> bool:
    try:
        return bool(adapters.version(name))
    except Unavailable:
        return False


async def test_requests_go_where_the_version_is_that_most_have() -> None:
    ledger = Ledger(a=Told(["x@1", "x@2"], {}), b=Told(["x@2"], {}), c=Told([], {"x": "no such folder"}), d=None)
    async with serving(ledger) as adapters:
        assert adapters.names == ("deployed",)
        assert (adapters.version("deployed"), adapters.lacking("deployed")) == ("deployed", frozenset())
        adapters.want({"x": "/x", "y": "/y"})
        assert adapters.names == ("deployed", "x", "y")
        await until(lambda: can_ask(adapters, "x"))
        assert (adapters.version("x"), adapters.lacking("x@2")) == ("x@2", frozenset("cd"))
        assert {frozenset(asked.items()) for asked in ledger.asked} == {frozenset({("x", "/x"), ("y", "/y")})}
        with pytest.raises(Unavailable, match=r"adapter 'y' is not loaded yet$"):
            adapters.version("y")
        ledger.told["c"] = Told([], {"y": "is odd"})
        await until(lambda: any("is odd" in event.text for event in ledger.journal.last(9)))
        with pytest.raises(Unavailable, match="adapter 'y' is not loaded yet: is odd"):
            adapters.version("y")


async def test_nobody_is_asked_while_there_is_nothing_to_ask_for() -> None:
    ledger = Ledger(a=Told(["x@1"], {}))
    async with serving(ledger) as adapters:
        await asyncio.sleep(0.05)
        assert ledger.asked == []
        adapters.want({"x": "/x"})
        await until(lambda: can_ask(adapters, "x"))
        adapters.want({})
        assert adapters.names == ("deployed",)
        await until(lambda: {} in ledger.asked)
        ledger.told["a"] = Told([], {})
        await until(lambda: not can_ask(adapters, "x"))
        await asyncio.sleep(0.05)
        count = len(ledger.asked)
        await asyncio.sleep(0.05)
        assert len(ledger.asked) == count
