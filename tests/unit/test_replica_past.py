"""What a replica reports of its past and of its blocks, and how a gateway asks for it over the feed."""

from __future__ import annotations

import pytest
from fixtures.engines import running_engine
from fixtures.fake_gateway import STATS
from fixtures.fake_serve import ask, serving
from fixtures.replicas import replica
from fixtures.waiting import until
from msgspec import structs

from shoal_cluster.serve.block_map import block_map, decode_block_map, encode_block_map
from shoal_cluster.serve.feed import FeedServer
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.past_sample import PAST_BUCKET_S, PAST_S, PastSample, decode_past
from shoal_cluster.serve.replica_past import ReplicaPast
from shoal_replica.errors import NotFound, Unavailable

START_S = 1_700_000_000.0  # the start of a bucket


async def test_a_bucket_keeps_the_peak_and_the_mean_rate() -> None:
    async with running_engine() as (engine, _, _):
        past = ReplicaPast(engine)
        past.add(structs.replace(STATS, time_s=START_S))
        before = len(past.samples())
        past.add(
            structs.replace(
                STATS, time_s=START_S + 10, num_allocated_blocks=60, num_waiting=5, num_generated_tokens=512
            )
        )
        past.add(structs.replace(STATS, time_s=START_S + 19, num_generated_tokens=772))
        assert len(past.samples()) == before, "the bucket has not ended"
        past.add(structs.replace(STATS, time_s=START_S + 21))
        assert past.samples()[-1] == PastSample(
            time_s=START_S + PAST_BUCKET_S,
            tokens_per_s=40.0,  # (772 - 12) / 19 s
            num_allocated_blocks=60,
            num_total_blocks=100,
            num_waiting=5,
            num_waiting_tokens=7,
        )


async def test_the_past_is_bounded_and_survives_its_encoding() -> None:
    async with running_engine() as (engine, _, _):
        past = ReplicaPast(engine)
        for i in range(int(24 * 3600 / PAST_BUCKET_S)):
            past.add(structs.replace(STATS, time_s=START_S + i * PAST_BUCKET_S))
        samples = past.samples()
        assert len(samples) == PAST_S / PAST_BUCKET_S
        assert decode_past(past.encoded()) == samples
        assert len(past.encoded()) < 60_000


def test_a_map_has_a_cell_a_block_or_the_hottest_of_several() -> None:
    heat = bytes([0, 5, 130, 127, 1])
    assert decode_block_map(encode_block_map(heat)).cells == heat
    small = block_map(heat, max_cells=2)
    assert (small.num_blocks, small.blocks_per_cell, small.cells) == (5, 3, bytes([130, 127]))
    assert block_map(b"").cells == b""


async def test_a_gateway_asks_a_replica_over_the_feed() -> None:
    async with replica() as one:
        one.feed._answers = {"heat": lambda _: one.engine.block_heat()}
        client = FeedClient("g", one.address, lambda message: None, lambda: None)
        await until(lambda: one.feed._subscribers)
        assert await client.ask("heat", 5.0) == bytes(64)
        with pytest.raises(Unavailable, match="'weather'"):
            await client.ask("weather", 5.0)
        await client.close()
        with pytest.raises(Unavailable, match="not connected"):
            await client.ask("heat", 5.0)


async def test_a_question_ends_with_the_feed() -> None:
    async with running_engine() as (engine, _, _):
        feed = FeedServer(engine, answers={"past": lambda _: _die(feed)})
        client = FeedClient("g", await feed.start("127.0.0.1"), lambda message: None, lambda: None)
        await until(lambda: feed._subscribers)
        with pytest.raises(Unavailable, match="broke"):
            await client.ask("past", 5.0)
        await client.close()
        await feed.stop()


def _die(feed: FeedServer) -> bytes:
    for subscriber in feed._subscribers.values():
        subscriber.transport.abort()
    return b"never sent"


async def test_the_ledger_asks_the_replica_that_is_named() -> None:
    async with serving("a") as serve:
        serve.replicas["a"].feed._answers = {"heat": lambda _: serve.replicas["a"].engine.block_heat()}
        await ask(serve, prompt_token_ids=tuple(range(21)))
        await until(lambda: serve.is_idle)
        heat = await serve.ledger.ask("a", "heat")
        assert len(heat) == 64
        assert sum(0 < cell < 128 for cell in heat) >= 5, "the prompt's full blocks are cached"
        with pytest.raises(NotFound, match="'z'"):
            await serve.ledger.ask("z", "heat")
