"""Adapters that come and go, as a gateway sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fixtures.fake_serve import serving as replicas
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.config import MAX_ADAPTERS
from shoal_cluster.serve import served_adapters
from shoal_cluster.serve.adapter_demand import FORGET_S, AdapterDemand, AdaptersTold, AdaptersWanted
from shoal_cluster.serve.call import Usage
from shoal_cluster.serve.feed_messages import MAX_REQUEST_BYTES
from shoal_cluster.serve.journal import Journal
from shoal_cluster.serve.metrics.model_tally import ModelTally
from shoal_cluster.serve.model_rows import model_rows
from shoal_cluster.serve.rows import ModelRow
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import Unavailable


class Ledger:
    """Replicas that answer what they are told to."""

    gateway_id = "g"

    def __init__(self, **told: AdaptersTold | None) -> None:
        self.told = told
        self.journal = Journal()
        self.asked: list[AdaptersWanted] = []
        self.num_asked = Counter[str]()

    @property
    def view(self) -> Any:
        return SimpleNamespace(replica_ids=tuple(self.told))

    async def ask(self, replica_id: str, question: str, body: bytes) -> bytes:
        self.asked.append(msgspec.msgpack.decode(body, type=AdaptersWanted))
        self.num_asked[replica_id] += 1
        if (answer := self.told[replica_id]) is None:
            raise Unavailable("its feed is not connected")
        return msgspec.msgpack.encode(answer)

    async def looks(self, replica_id: str) -> None:
        """Return once a replica was asked at three looks more: what the others said before is known by then."""
        count = self.num_asked[replica_id]
        await until(lambda: self.num_asked[replica_id] >= count + 3)


def has(*versions: str, **current: str) -> AdaptersTold:
    return AdaptersTold(current, list(versions), {})


def fails(**failures: str) -> AdaptersTold:
    return AdaptersTold({}, [], failures)


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


def version(adapters: ServedAdapters, name: str) -> str:
    try:
        return adapters.version(name)
    except Unavailable:
        return ""


async def test_requests_go_where_the_version_is_that_most_have_as_theirs() -> None:
    # "1" is the older version: by its letters it would come after "0".
    ledger = Ledger(
        a=has("x@1", "x@0", x="x@0"), b=has("x@0", x="x@0"), c=has("x@1", x="x@1"), d=fails(x="no folder"), e=None
    )
    async with serving(ledger) as adapters:
        assert adapters.names == ("deployed",)
        assert (adapters.version("deployed"), adapters.lacking("deployed")) == ("deployed", frozenset())
        adapters.want({"x": "/x", "y": "/y"})
        assert adapters.names == ("deployed", "x", "y")
        await until(lambda: version(adapters, "x") == "x@0")
        assert adapters.lacking("x@0") == frozenset("cde")
        assert [adapters.num_replicas(name) for name in ("", "deployed", "x", "y")] == [5, 5, 2, 0]
        tally = ModelTally("g", ["m", "deployed"])
        usage = Usage(num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=2, replica_id="a", ttft_s=0.1)
        tally.add("x", usage)
        assert model_rows("m", adapters, tally) == (
            ModelRow("m", 5),
            ModelRow("deployed", 5),
            ModelRow("x", 2, 1, 9, 4, 2),
            ModelRow("y", 0),
        )
        assert {frozenset(asked.sources.items()) for asked in ledger.asked[-3:]} == {
            frozenset({("x", "/x"), ("y", "/y")})
        }
        with pytest.raises(Unavailable, match=r"adapter 'y' is not loaded yet$"):
            adapters.version("y")
        ledger.told["c"] = fails(y="is odd")
        await until(lambda: any("is odd" in event.text for event in ledger.journal.last(9)))
        with pytest.raises(Unavailable, match="adapter 'y' is not loaded yet: is odd"):
            adapters.version("y")


async def test_a_replica_that_does_not_answer_keeps_what_it_said_and_holds_up_nobody() -> None:
    ledger = Ledger(a=has("x@1", x="x@1"), b=None)
    async with serving(ledger) as adapters:
        adapters.want({"x": "/x"})
        await until(lambda: version(adapters, "x") == "x@1")
        ledger.told["a"] = None
        asked = len(ledger.asked)
        await until(lambda: len(ledger.asked) > asked + 4)
        assert version(adapters, "x") == "x@1"
        del ledger.told["a"]
        await until(lambda: not version(adapters, "x"))


async def test_versions_of_open_calls_are_asked_to_be_kept() -> None:
    ledger = Ledger(a=has("x@1", x="x@1"))
    async with serving(ledger) as adapters:
        adapters.want({"x": "/x"})
        await until(lambda: version(adapters, "x") == "x@1")
        with adapters.using("x@1"), adapters.using("x@1"), adapters.using(""), adapters.using("deployed"):
            await until(lambda: ledger.asked[-1].in_use == ["x@1"])
        await until(lambda: ledger.asked[-1].in_use == [])


async def test_a_request_waits_until_some_replica_has_its_version() -> None:
    ledger = Ledger(a=None)
    async with serving(ledger) as adapters:
        adapters.want({"x": "/x"})
        await adapters.until_somewhere("x@1", 0.05)
        waiting = asyncio.create_task(adapters.until_somewhere("x@1", DEADLINE_S))
        ledger.told["a"] = has("x@1", x="x@1")
        await asyncio.wait_for(waiting, DEADLINE_S)
        assert adapters.lacking("x@1") == frozenset()


async def test_a_replica_is_asked_until_it_has_nothing_that_nobody_wants() -> None:
    ledger = Ledger(a=has("x@1", x="x@1"), b=has())
    async with serving(ledger) as adapters:  # as after a restart of the gateway
        await until(lambda: len(ledger.asked) > 8)
        assert {len(asked.sources) for asked in ledger.asked} == {0}
        assert not version(adapters, "x")
        ledger.told |= {"a": has(), "c": has("y@1", y="y@1")}  # this one is asked at every look
        await ledger.looks("c")
        count = ledger.num_asked["a"], ledger.num_asked["b"]
        await ledger.looks("c")
        assert (ledger.num_asked["a"], ledger.num_asked["b"]) == count


def test_gateways_may_differ_for_a_while() -> None:
    now = [0.0]
    demand = AdapterDemand(lambda: now[0])
    assert demand.take(AdaptersWanted("old", {"x": "/1", "y": "/y"}, ["x@1"]))
    assert demand.take(AdaptersWanted("new", {"x": "/2"}))
    assert not demand.take(
        AdaptersWanted("old", {"x": "/1", "y": "/y"}, ["x@1"])
    )  # repeated: the newer one still counts
    assert (demand.sources(), demand.in_use()) == ({"x": "/2", "y": "/y"}, {"x@1"})
    now[0] = FORGET_S / 2
    demand.take(AdaptersWanted("new", {"x": "/2"}))
    now[0] = FORGET_S + 1
    assert (demand.sources(), demand.in_use()) == ({"x": "/2"}, set())
    now[0] = 10 * FORGET_S
    assert demand.sources() == {"x": "/2"}  # without any gateway, nothing goes


async def test_thousands_of_adapters_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and sources take more bytes than a request may."""
    sources = {f"customer-{number:05}": f"/shared/adapters/customer-{number:05}/v1" for number in range(MAX_ADAPTERS)}
    async with replicas("a") as serve:
        asked: list[bytes] = []

        def answer(body: bytes) -> bytes:
            asked.append(body)
            return msgspec.msgpack.encode(AdaptersTold({}, [], {}))

        monkeypatch.setattr(serve.replicas["a"].feed, "_answers", {served_adapters.ADAPTERS: answer})
        adapters = ServedAdapters(serve.ledger, ())
        adapters.want(sources)
        task = asyncio.create_task(adapters.run())
        await until(lambda: adapters._asked.get("a"))
        assert len(asked[-1]) > MAX_REQUEST_BYTES
        task.cancel()
        await asyncio.wait([task])
