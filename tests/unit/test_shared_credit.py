"""Two gateways over the same replicas: each counts what the other has promised."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fixtures.replicas import Replica, replica
from fixtures.waiting import until

from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.feed_messages import InFlight, ToldWish
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.member import Member
from shoal_cluster.serve.sent_requests import Follower
from shoal_cluster.serve.subscriber import Subscriber
from shoal_replica.prefix_cache import hash_blocks


def query(request_id: str, num_tokens: int = 40) -> RouteQuery:
    return RouteQuery(
        request_id=request_id,
        block_hashes=(),
        num_prompt_tokens=num_tokens,
        num_blocks_needed=num_tokens // 4 + 1,
        block_size=4,
    )


def follow(ledger: GatewayLedger, request_id: str) -> None:
    ledger.follow(request_id, Follower())


def row(ledger: GatewayLedger, replica_id: str) -> ReplicaView:
    return ledger.view.candidates((), 0.0).view(replica_id)


@asynccontextmanager
async def two_gateways(
    *names: str, **fields: Any
) -> AsyncIterator[tuple[GatewayLedger, GatewayLedger, dict[str, Replica]]]:
    async with AsyncExitStack() as stack:
        replicas = {name: await stack.enter_async_context(replica(**fields)) for name in names}
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


HASHES = tuple(hash_blocks(range(40), 4))


def num_expected(ledger: GatewayLedger, replica_id: str) -> int:
    """How many leading blocks of ``HASHES`` the gateway counts as cached at the replica, or about to be."""
    return ledger.view.candidates(HASHES, 0.0).matched_by(replica_id)


@pytest.fixture
def no_beats(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Settings of replicas that send no heartbeats while a step runs."""
    monkeypatch.setattr("shoal_replica.engine.BEAT_S", 60.0)
    monkeypatch.setattr("shoal_cluster.serve.feed_messages.SILENCE_S", 60.0)
    return {"heartbeat_s": 60.0}


async def test_a_prompt_that_one_gateway_has_sent_is_followed_by_what_begins_alike_at_the_other(
    no_beats: dict[str, float],
) -> None:
    async with two_gateways("one", **no_beats) as (left, right, replicas):
        one = replicas["one"]
        await one.run("r0", "left", prompt_token_ids=range(300, 303), max_tokens=1)  # so that it reports once
        one.executor.gate.clear()
        running = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES, max_tokens=1)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        assert not num_expected(left, "one"), "its own are known to its view"
        assert right.view.index.num_held("one") == 0
        late = GatewayLedger("late", RouteWeights(), num_gateways=3)
        late.set_members([Member("one", "node", one.address)])
        await until(lambda: num_expected(late, "one") == len(HASHES))
        one.executor.gate.set()
        await running
        for ledger in (right, late):
            await until(lambda: ledger.view.index.num_held("one") > 0)  # noqa: B023
            await until(lambda: not ledger.view.index.expected.has_any(HASHES))  # noqa: B023
            assert num_expected(ledger, "one") == ledger.view.index.num_held("one")
            ledger.view.check_invariants()
        await late.close()


async def test_a_prompt_lands_with_its_first_token() -> None:
    async with two_gateways("one") as (_, right, replicas):
        one = replicas["one"]
        one.executor.gate.clear()
        running = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES, max_tokens=80)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        one.executor.gate.set()
        await until(lambda: not right.view.index.expected.has_any(HASHES))
        assert not running.done()
        assert not one.feed._subscribers["right"].has_prompts_to_hear_of, "it is told once"
        await running


async def test_what_two_prompts_bring_is_expected_until_the_last_is_given_up() -> None:
    longer = tuple(hash_blocks([*range(40), *range(200, 220)], 4))
    async with two_gateways("one") as (_, right, replicas):
        one = replicas["one"]
        one.executor.gate.clear()
        busy = one.run("r0", "left", prompt_token_ids=range(100, 140))
        first = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES)
        second = one.run("r2", "left", prompt_token_ids=[*range(40), *range(200, 220)], block_hashes=longer)
        await until(lambda: right.view.candidates(longer, 0.0).matched_by("one") == len(longer))
        assert one.engine.hand_back("r1")
        heard_s = float(right.view.candidates((), 0.0).updated_s[0])
        await until(lambda: float(right.view.candidates((), 0.0).updated_s[0]) > heard_s)
        assert right.view.candidates(longer, 0.0).matched_by("one") == len(longer)
        assert one.engine.hand_back("r2")
        await until(lambda: right.view.candidates(longer, 0.0).matched_by("one") == 0)
        one.executor.gate.set()
        await asyncio.wait([busy, first, second])


async def test_what_was_given_up_while_a_feed_was_broken_is_not_expected_afterwards() -> None:
    async with two_gateways("one") as (_, right, replicas):
        one = replicas["one"]
        one.executor.gate.clear()
        running = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        one.feed._subscribers["right"].transport.abort()
        await until(lambda: not right.view.is_connected("one"))
        running.cancel()
        await until(lambda: right.view.is_connected("one"))
        assert num_expected(right, "one") == 0
        one.executor.gate.set()
        await asyncio.wait([running])


async def test_nothing_is_expected_of_a_replica_that_caches_nothing_or_has_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[InFlight] = []
    monkeypatch.setattr(Subscriber, "note_launched", lambda self, prompt: told.append(prompt))
    async with two_gateways("one") as (_, _, replicas):
        one = replicas["one"]
        for request_id in ("r1", "r2"):
            await one.run(request_id, "left", prompt_token_ids=range(40), block_hashes=HASHES, max_tokens=1)
    assert [prompt.request_id for prompt in told] == ["r1"]
    async with two_gateways("one", enable_prefix_caching=False) as (_, _, replicas):
        await replicas["one"].run("r3", "left", prompt_token_ids=range(40), block_hashes=HASHES, max_tokens=1)
    assert [prompt.request_id for prompt in told] == ["r1"]


async def test_only_what_is_not_cached_is_told_of_a_prompt_in_flight() -> None:
    async with two_gateways("one") as (_, right, replicas):
        one = replicas["one"]
        await one.run("r1", "left", prompt_token_ids=range(20), block_hashes=HASHES[:5], max_tokens=1)
        await until(lambda: num_expected(right, "one") == 5)
        one.executor.gate.clear()
        running = one.run("r2", "left", prompt_token_ids=range(40), block_hashes=HASHES, max_tokens=1)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        assert right.view.index.expected.num_held(right.view.index.slot("one")) == len(HASHES) - 5
        one.executor.gate.set()
        await running


@pytest.mark.parametrize("end", ["abort", "hand_back", "gateway"])
async def test_a_prompt_that_is_given_up_is_expected_no_longer(end: str, no_beats: dict[str, float]) -> None:
    async with two_gateways("one", **no_beats) as (left, right, replicas):
        one = replicas["one"]
        await one.run("r", "left", prompt_token_ids=range(300, 303), max_tokens=1)
        one.executor.gate.clear()
        first = one.run("r0", "left", prompt_token_ids=range(100, 140))
        running = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        if end == "abort":
            running.cancel()
        elif end == "hand_back":
            assert one.engine.hand_back("r1")
        else:
            await left.close()
        await until(lambda: num_expected(right, "one") == 0)
        one.executor.gate.set()
        await asyncio.wait([first, running])


async def test_a_replica_that_leaves_takes_along_what_was_in_flight_there() -> None:
    async with two_gateways("one", "two") as (_, right, replicas):
        one = replicas["one"]
        one.executor.gate.clear()
        running = one.run("r1", "left", prompt_token_ids=range(40), block_hashes=HASHES)
        await until(lambda: num_expected(right, "one") == len(HASHES))
        right.set_members([Member("two", "node", replicas["two"].address)])
        assert not right.view.index.expected.has_any(HASHES)
        right.set_members([Member(name, "node", made.address) for name, made in replicas.items()])
        await until(lambda: num_expected(right, "one") == len(HASHES))
        one.executor.gate.set()
        await running
        await until(lambda: not right.view.index.expected.has_any(HASHES))
        right.view.check_invariants()


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


def test_a_wish_comes_as_it_was_told() -> None:
    wish = Wish((1, 2, 7.5), 4, 40, 3, 20, 4.5, 3.0, is_over=True)
    assert ToldWish.at(wish, 5.0).wish(6.0) == replace(wish, rank=(1, 2, 8.5), arrival_s=5.5)


async def test_what_one_gateway_holds_the_other_knows_until_it_is_gone(no_beats: dict[str, float]) -> None:
    async with two_gateways("one", "two", **no_beats) as (left, right, replicas):
        for name, made in replicas.items():  # so that each reports once
            await made.run(f"first-{name}", "left", prompt_token_ids=range(300, 303), max_tokens=1)
        now = time.monotonic()
        lost = Wish((0, 0, now + 5.0), 2, 20, arrival_s=now - 3.0, length_s=2.0)
        left.wish({"one": (Wish((0, 1, now + 3.0), 4, 40), lost)})
        await until(lambda: len(right.view.wishes(now)) == 2)
        sooner, later = (placed.wish for placed in right.view.wishes(now))
        assert (sooner.rank[:2], sooner.num_blocks, sooner.num_tokens) == ((0, 0), 2, 20)
        assert sooner.rank[2] == pytest.approx(now + 5.0, abs=1.0), "the way there takes a little"
        assert sooner.rank[2] - sooner.arrival_s == pytest.approx(8.0)
        assert (sooner.length_s, later.length_s) == (2.0, math.inf)
        assert later.rank[:2] == (0, 1)
        assert not left.view.wishes(now), "its own are known to its queue"
        left.wish({"two": (Wish((0, 0, now + 3.0), 4, 40),)})
        await until(lambda: [placed.place for placed in right.view.wishes(now)] == [1])
        await left.close()
        await until(lambda: not right.view.wishes(now))
