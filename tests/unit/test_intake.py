"""What a call goes through before it is placed: its deadline holds, and while it waits for its adapter, it is held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from fixtures.cluster_views import make_stats
from fixtures.memory_store import MemoryStore
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.answer_readers import AnswerReaders
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.call_observer import CallWatch
from shoal_cluster.serve.call_times import CallTimes
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.intake import Intake
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_cluster.serve.request_maker import Made
from shoal_cluster.serve.scaling_board import ScalingBoard
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams

CALL = GenerateCall(request_id="call", sampling_params=SamplingParams(), text="hello")
PATIENCE_S = 0.3
MAX_WAITING = 2
METRICS = GatewayMetrics("g", ("m",), LatencyWindow(LatencyTargets()))


@dataclass
class Reader:
    """In place of a RequestMaker: its texts have three tokens each, and take ``takes_s`` to read."""

    takes_s: float = 0.0

    async def make(self, call: GenerateCall, arrived_s: float, max_model_len: int) -> Made:
        await asyncio.sleep(self.takes_s)
        request = Request(request_id=call.request_id, prompt_token_ids=(1, 2, 3), sampling_params=call.sampling_params)
        return Made(request, AnswerReaders([]), frozenset())


@dataclass
class Setup:
    """An intake and what it is made of."""

    ledger: GatewayLedger
    desk: ScalingDesk
    adapters: ServedAdapters
    reader: Reader = field(default_factory=Reader)
    start_failure: str = ""
    watch: CallWatch = field(default_factory=lambda: CallWatch(CALL, CallTimes(0.0, 1, METRICS)))

    def __post_init__(self) -> None:
        deployment = SimpleNamespace(start_failure=lambda: self.start_failure)
        parts = self.ledger, self.desk, self.adapters, deployment, PATIENCE_S, MAX_WAITING
        self.intake = Intake(self.reader, *parts)  # type: ignore[arg-type]

    async def take(self, adapter: str = "", timeout_s: float = 5.0) -> str:
        """The adapter's version for a call that arrives now."""
        self.watch.times.arrived_s = time.monotonic()
        return (await self.intake.take(self.watch, adapter, timeout_s, 100)).request.adapter

    def load(self, version: str) -> None:
        """Some replica has told that it has a version of ``x``."""
        self.adapters._current = {"x": version}


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    ledger = GatewayLedger("g", RouteWeights())
    desk = ScalingDesk(ScalingBoard("app", MemoryStore()), ledger, 1, ScaleConfig(min_replicas=0))
    adapters = ServedAdapters(ledger, ("deployed",))
    adapters.want({"x": "/x"})
    yield Setup(ledger, desk, adapters)
    await desk.close()
    await ledger.close()


async def test_a_call_is_counted_when_it_has_been_read(setup: Setup) -> None:
    assert await setup.take() == ""
    assert await setup.take("deployed") == "deployed"
    setup.load("x@1")
    assert await setup.take("x") == "x@1"
    assert setup.desk.meter.demand == Demand(num_requests=3, num_prompt_tokens=9)


async def test_a_prompt_that_takes_too_long_to_read_ends_at_the_deadline(setup: Setup) -> None:
    setup.reader.takes_s = 60.0
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.05 s"):
        await setup.take(timeout_s=0.05)
    assert setup.desk.meter.demand == Demand()


async def test_a_gateway_that_stops_ends_what_it_still_takes_in(setup: Setup) -> None:
    call = asyncio.create_task(setup.take("x"))
    await until(lambda: setup.desk.meter.demand.num_held == 1)
    assert setup.watch.fail is not None
    setup.watch.fail(Unavailable("this gateway has stopped"))
    await asyncio.sleep(0)
    setup.watch.fail(Unavailable("too late"))  # it is ending already
    with pytest.raises(Unavailable, match="has stopped"):
        await call
    assert setup.watch.fail is None


async def test_a_call_for_an_adapter_that_nobody_has_yet_is_held(setup: Setup) -> None:
    """A cluster without replicas starts one for it: see ``test_held_requests_wake_a_cluster_at_zero``."""
    call = asyncio.create_task(setup.take("x"))
    await until(lambda: setup.desk.meter.demand.num_held == 1)
    assert setup.desk.meter.demand == Demand(num_requests=1, num_prompt_tokens=3, num_held=1, num_held_tokens=3)
    setup.load("x@7")
    assert await call == "x@7"
    assert setup.desk.meter.demand.num_held == 0


async def test_where_replicas_are_it_only_waits(setup: Setup) -> None:
    """They load it: more of them would be no sooner."""
    setup.ledger.view.join("r")
    setup.ledger.view.apply_snapshot("r", make_stats(), (), time.monotonic())
    call = asyncio.create_task(setup.take("x"))
    await until(lambda: setup.desk.meter.demand.num_requests == 1)
    assert setup.desk.meter.demand.num_held == 0
    setup.load("x@7")
    assert await call == "x@7"


async def test_patience_begins_anew_while_replicas_start(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that is up has to load the adapter."""
    num_looks, is_growing = 0, True

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_growing

    async def looks(count: int) -> None:
        seen = num_looks
        await until(lambda: num_looks >= seen + count)

    monkeypatch.setattr(setup.desk, "is_growing", look)
    setup.intake._patience_s = 0.0
    call = asyncio.create_task(setup.take("x", timeout_s=DEADLINE_S))
    await looks(3)  # its patience at the beginning is over
    setup.intake._patience_s = DEADLINE_S
    await looks(2)
    is_growing = False
    await looks(2)
    setup.load("x@1")
    assert await call == "x@1"


async def test_it_is_held_no_longer_than_makes_sense(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="'x' is not loaded yet"):
        await setup.take("x")
    assert [refusal.reason for refusal in setup.ledger.routes.of_request("call").refusals] == [
        "adapter 'x' is not loaded yet"
    ]
    monkeypatch.setattr(setup.desk, "is_growing", lambda: True)
    with pytest.raises(DeadlineExceeded):  # while one is starting, its own deadline counts
        await setup.take("x", timeout_s=3 * PATIENCE_S)
    setup.start_failure = "no memory"
    with pytest.raises(Unavailable, match="no replica could be started: no memory"):
        await setup.take("x")
    counted = setup.desk.meter.demand
    assert (counted.num_requests, counted.num_held) == (3, 0)
    setup.adapters._failures = {"x": "no folder"}
    with pytest.raises(Unavailable, match="no folder"):
        await setup.take("x")
    setup.adapters._failures = {}
    setup.adapters.want({})
    with pytest.raises(Unavailable, match="not loaded"):
        await setup.take("x")
    assert setup.desk.meter.demand == counted, "what cannot be served is no demand"


async def test_only_so_many_wait(setup: Setup) -> None:
    calls = [asyncio.create_task(setup.take("x")) for _ in range(MAX_WAITING)]
    await until(lambda: setup.intake._num_waiting == MAX_WAITING)
    with pytest.raises(ResourceExhausted, match="2 requests wait for an adapter; 2 may"):
        await setup.take("x")
    setup.load("x@1")
    assert await asyncio.gather(*calls) == ["x@1", "x@1"]
    assert setup.intake._num_waiting == 0
