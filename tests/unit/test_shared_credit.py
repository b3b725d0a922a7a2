"""Two gateways over the same replicas: what one has promised, the other counts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fixtures.replicas import Replica, replica
from fixtures.waiting import until

from shoal_cluster.policies.candidates import ReplicaView
from shoal_cluster.policies.routing import RouteQuery, RouteWeights
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.gateway_ledger import GatewayLedger, Member
from shoal_cluster.serve.sent import Follower


def query(request_id: str, num_tokens: int = 40) -> RouteQuery:
    return RouteQuery(
        request_id=request_id,
        block_hashes=(),
        num_prompt_tokens=num_tokens,
        num_blocks_needed=num_tokens // 4 + 1,
        block_size=4,
    )


def follow(ledger: GatewayLedger, request_id: str) -> None:
    ledger.follow(request_id, Follower(lambda *_: None, lambda *_: None, lambda *_: None, lambda: None))


def row(ledger: GatewayLedger, replica_id: str) -> ReplicaView:
    return ledger.view.candidates((), 0.0).view(replica_id)


@asynccontextmanager
async def two_gateways(*names: str) -> AsyncIterator[tuple[GatewayLedger, GatewayLedger, dict[str, Replica]]]:
    async with AsyncExitStack() as stack:
        replicas = {name: await stack.enter_async_context(replica()) for name in names}
        ledgers = [GatewayLedger(name, RouteWeights(), num_gateways=2) for name in ("left", "right")]
        for ledger in ledgers:
            stack.push_async_callback(ledger.close)
            ledger.set_members([Member(name, "node", made.address) for name, made in replicas.items()])
            await until(lambda ledger=ledger: all(ledger.view.is_connected(name) for name in replicas))
        yield ledgers[0], ledgers[1], replicas


async def test_a_promise_is_known_to_the_other_gateway_until_it_ends() -> None:
    async with two_gateways("one") as (left, right, _):
        follow(left, "r1")
        follow(left, "r2")
        left.decide(query("r1"))
        left.decide(query("r2", 20))
        await until(lambda: row(right, "one").num_reserved == 2)
        assert row(right, "one").num_reserved_blocks == 11 + 6
        assert row(right, "one").num_reserved_tokens == 60
        assert row(left, "one").num_reserved == 2, "its own are counted once"
        left.unfollow("r1")
        await until(lambda: row(right, "one").num_reserved == 1)
        assert row(right, "one").num_reserved_tokens == 20
        await left.close()
        await until(lambda: row(right, "one").num_reserved == 0)


async def test_a_request_that_has_come_is_counted_by_the_replica_and_promised_no_longer() -> None:
    async with two_gateways("one") as (left, right, replicas):
        one = replicas["one"]
        one.executor.gate.clear()
        follow(left, "r1")
        left.decide(query("r1"))
        await until(lambda: row(right, "one").num_reserved == 1)
        running = one.run("r1", "left", prompt_token_ids=range(40))
        await until(lambda: row(right, "one").num_reserved == 0)
        stats = row(right, "one").stats
        assert stats is not None
        assert stats.num_running + stats.num_waiting == 1
        one.executor.gate.set()
        await running
        left.unfollow("r1")


async def test_a_request_that_goes_elsewhere_takes_its_promise_along() -> None:
    async with two_gateways("one", "two") as (left, right, _):
        follow(left, "r1")
        chosen = left.decide(query("r1")).ranked[0]
        other = "two" if chosen == "one" else "one"
        await until(lambda: row(right, chosen).num_reserved == 1)
        left.routed("r1", other)
        await until(lambda: (row(right, chosen).num_reserved, row(right, other).num_reserved) == (0, 1))


async def test_gateways_that_share_credit_do_not_all_choose_the_same() -> None:
    async with two_gateways("one", "two") as (left, right, _):
        for number in range(8):
            ledger, other = (left, right) if number % 2 else (right, left)
            request_id = f"r{number}"
            follow(ledger, request_id)
            chosen = ledger.decide(query(request_id)).ranked[0]
            expected = row(ledger, chosen).num_reserved
            await until(lambda: row(other, chosen).num_reserved == expected)  # noqa: B023
        assert row(left, "one").num_reserved == row(left, "two").num_reserved == 4


async def test_what_one_gateway_holds_the_other_knows_until_it_is_gone() -> None:
    async with two_gateways("one", "two") as (left, right, _):
        now = time.monotonic()
        left.wish({"one": (Wish((0, 1, now + 3.0), 4, 40), Wish((0, 0, now + 5.0), 2, 20))})
        await until(lambda: len(right.view.wishes(now)) == 2)
        sooner, later = (placed.wish for placed in right.view.wishes(now))
        assert (sooner.rank[:2], sooner.num_blocks, sooner.num_tokens) == ((0, 0), 2, 20)
        assert sooner.rank[2] == pytest.approx(now + 5.0, abs=1.0), "the way there takes a little"
        assert later.rank[:2] == (0, 1)
        assert not left.view.wishes(now), "its own are known to its queue"
        left.wish({"two": (Wish((0, 0, now + 3.0), 4, 40),)})
        await until(lambda: [placed.place for placed in right.view.wishes(now)] == [1])
        await left.close()
        await until(lambda: not right.view.wishes(now))
