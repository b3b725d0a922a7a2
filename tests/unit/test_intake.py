"""What a call goes through before it is placed: its deadline holds, and while it waits for its adapter, it is held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from fixtures.memory_store import MemoryStore
from fixtures.waiting import until

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.answer_readers import AnswerReaders
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.intake import Intake
from shoal_cluster.serve.request_maker import Made
from shoal_cluster.serve.scaling_board import ScalingBoard
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import DeadlineExceeded, Unavailable
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams

CALL = GenerateCall(request_id="call", sampling_params=SamplingParams(), text="hello")
PATIENCE_S = 0.3


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

    async def take(self, adapter: str = "", timeout_s: float = 5.0) -> str:
        """The adapter's version for a call that arrives now."""
        intake = Intake(self.reader, self.ledger, self.desk, self.adapters, PATIENCE_S)  # type: ignore[arg-type]
        return (await intake.take(CALL, adapter, time.monotonic(), timeout_s, 100)).request.adapter

    def load(self, version: str) -> None:
        """Some replica has told that it has a version of ``x``."""
        self.adapters._current = {"x": version}


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    ledger = GatewayLedger("g", RouteWeights())
    desk = ScalingDesk(ScalingBoard("app", MemoryStore()), ledger, 1, ScaleConfig(min_replicas=0))
    yield Setup(ledger, desk, ServedAdapters(ledger, ("deployed",)))
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


async def test_a_call_for_an_adapter_that_nobody_has_yet_is_held(setup: Setup) -> None:
    """A cluster without replicas starts one for it: see ``test_held_requests_wake_a_cluster_at_zero``."""
    call = asyncio.create_task(setup.take("x"))
    await until(lambda: setup.desk.meter.demand.num_held == 1)
    assert setup.desk.meter.demand == Demand(num_requests=1, num_prompt_tokens=3, num_held=1, num_held_tokens=3)
    setup.load("x@7")
    assert await call == "x@7"
    assert setup.desk.meter.demand.num_held == 0


async def test_it_is_held_no_longer_than_makes_sense(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="'x' is not loaded yet"):
        await setup.take("x")
    monkeypatch.setattr(setup.desk, "is_growing", lambda: True)
    with pytest.raises(DeadlineExceeded):  # while one is starting, its own deadline counts
        await setup.take("x", timeout_s=3 * PATIENCE_S)
    setup.adapters._failures = {"x": "no folder"}
    with pytest.raises(Unavailable, match="no folder"):
        await setup.take("x")
    assert setup.desk.meter.demand.num_held == 0
