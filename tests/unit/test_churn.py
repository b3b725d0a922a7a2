"""Gateways over replicas that join, die, drain, hang, change their roles and lose their feeds, all at once: every call
gets its answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack
from random import Random

import pytest
from fixtures.fake_serve import FakeServe, ask
from fixtures.replicas import Replica, replica
from fixtures.waiting import until

from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_replica.testing import expected_tokens

NUM_TURNS = 150
HANG_S = 0.03
MAX_REPLICAS = 3


class Churn:
    """Events drawn at random from ``rng``. A client may leave; nothing else may go wrong for a request."""

    def __init__(self, rng: Random, num_gateways: int, stack: AsyncExitStack) -> None:
        self.rng, self.stack = rng, stack
        self.serves = [FakeServe(GatewayLedger(f"g{n}", RouteWeights(), num_gateways)) for n in range(num_gateways)]
        for serve in self.serves:
            serve.is_growing = True
            serve.hold()
        self.replicas: dict[str, Replica] = {}
        self.ever: list[Replica] = []  # those that are gone, too
        self.calls: list[asyncio.Task[None]] = []
        self.happened = Counter[str]()
        self._names = (f"r{number}" for number in itertools.count())

    async def turn(self) -> None:
        kinds = {"ask": 60, "leave": 8, "lose": 8, "start": 10, "break": 12, "hang": 4, "share out": 4}
        (kind,) = self.rng.choices([*kinds], [*kinds.values()])
        if kind == "ask":
            for _ in range(self.rng.choice((1, 1, 4))):
                self.calls.append(asyncio.create_task(self.ask(1 + len(self.calls))))
        elif kind == "leave" and self.calls:
            self.rng.choice(self.calls).cancel()
        elif kind == "start" and len(self.replicas) < MAX_REPLICAS:
            await self.start()
        elif kind == "share out":
            self.share_out(self.rng.choice((0.0, 0.4, 0.6)))
        elif self.replicas:
            await {"lose": self._lose, "break": self._break, "hang": self._hang}.get(kind, self._nothing)()
        self.happened[kind] += 1
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.005)))

    async def start(self) -> None:
        name, max_num_seqs = next(self._names), self.rng.choice((1, 2, 4))
        made = await self.stack.enter_async_context(replica(max_num_seqs=max_num_seqs))
        self.replicas[name] = made
        self.ever.append(made)
        for serve in self.serves:
            serve.join(name, made)

    def share_out(self, prefill_share: float) -> None:
        for serve in self.serves:
            serve.ledger.phases.roles.share = prefill_share

    async def end(self) -> None:
        """Wait for every call to end, then check that gateways and replicas have nothing left of any."""
        if not self.replicas:
            await self.start()
        for ended in await asyncio.gather(*self.calls, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended
        for serve in self.serves:
            await until(lambda serve=serve: serve.is_idle)
            await until(lambda serve=serve: not serve.ledger.view.present(time.monotonic()).num_reserved.any())
            assert serve.dispatcher is not None
            assert serve.dispatcher.num_held == serve.dispatcher._queue.num_blocks_to_decode == 0
            assert not len(serve.ledger.view.index.expected)
            serve.ledger.view.check_invariants()
        for made in self.replicas.values():
            made.engine.check_invariants()

    async def ask(self, number: int) -> None:
        serve, count = self.rng.choice(self.serves), self.rng.choice((4, 12))
        n, prompt = self.rng.choice((1, 1, 2)), [*range(8 * self.rng.randrange(1, 4)), 500 + number % 7, 600 + number]
        answer = await ask(serve, f"call{number}", prompt_token_ids=prompt, max_tokens=count, n=n)
        assert answer.tokens == [expected_tokens(prompt, count, index) for index in range(n)]

    async def _lose(self) -> None:
        made = self.replicas.pop(name := self.rng.choice([*self.replicas]))
        made.executor.gate.set()
        if dies := self.rng.random() < 0.5:
            await made.die()
        for serve in self.serves:
            serve.leave(name)
            await asyncio.sleep(self.rng.choice((0.0, 0.002)))
        if not dies and self.rng.random() < 0.5:
            await made.die()

    async def _break(self) -> None:
        for subscriber in [*self.rng.choice([*self.replicas.values()]).feed._subscribers.values()]:
            if self.rng.random() < 0.6:
                subscriber.transport.abort()

    async def _hang(self) -> None:
        gate = self.rng.choice([*self.replicas.values()]).executor.gate
        gate.clear()
        asyncio.get_running_loop().call_later(HANG_S, gate.set)

    async def _nothing(self) -> None:
        """The event cannot happen: no room for another replica, or no client that could leave."""


@pytest.mark.parametrize(("num_gateways", "seed"), [(1, 0), (1, 1), (2, 2), (3, 3), (3, 4)])
async def test_whatever_becomes_of_replicas_every_call_gets_its_answer(num_gateways: int, seed: int) -> None:
    async with AsyncExitStack() as stack:
        churn = Churn(Random(seed), num_gateways, stack)
        await churn.start()
        await churn.start()
        churn.share_out(0.5)
        try:
            for serve in churn.serves:
                await until(lambda serve=serve: serve.ledger.view.has_roles)
            await churn.ask(0)
            for _ in range(NUM_TURNS):
                await churn.turn()
            await churn.end()
        finally:
            for serve in churn.serves:
                await serve.ledger.close()
        assert {"ask", "leave", "lose", "start", "break", "hang", "share out"} <= churn.happened.keys()
        assert any(leg.end == "prefilled" for serve in churn.serves for times in serve.times for leg in times.legs)
        assert sum(made.engine.stats().num_blocks_taken for made in churn.ever) > 0
