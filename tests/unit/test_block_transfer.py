"""A request finds at its replica the blocks that another replica has computed, or computes them: whichever, it runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest
from fixtures.cluster_views import make_row
from fixtures.fake_serve import Answer, ask, serving
from fixtures.replicas import Replica, replica
from fixtures.waiting import until

from shoal_cluster.policies.block_offer import BlockOffer, best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.transfer_pace import FORGET_S, START_S, TransferPace
from shoal_cluster.serve import block_fetcher, block_server
from shoal_cluster.serve.block_wire import MAX_FRAME_BYTES, BlocksWanted, Coming, receive, receive_blocks, send_blocks
from shoal_cluster.serve.feed_messages import BlockSource, Subscribe
from shoal_replica import guest_table
from shoal_replica.executor import BlockPart
from shoal_replica.frames import frame
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.testing import expected_tokens, make_request

PROMPT = tuple(range(100, 130))  # seven whole blocks of four tokens
HASHES = tuple(hash_blocks(PROMPT, 4))
REQUEST = make_request("r", PROMPT, block_hashes=HASHES)


def source_of(made: Replica, num_blocks: int = 7) -> BlockSource:
    return BlockSource(*made.blocks_address, num_blocks)


async def answered(made: Replica, source: BlockSource | None) -> list[int]:
    """The tokens of ``REQUEST`` at a replica that is told of ``source``."""
    outcome = await made.call(replace(REQUEST, request_id="r"), "g", source)
    assert not outcome.refused, outcome.reason
    return made.recorder.tokens["r", 0]


async def followed(made: Replica) -> socket.socket:
    """A gateway that follows the feed and reads nothing."""
    reader = socket.create_connection(made.address)
    reader.sendall(frame(Subscribe("g")))
    await until(lambda: made.feed._subscribers)
    return reader


async def test_a_request_finds_the_blocks_of_another_replica() -> None:
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        with await followed(other):
            assert await answered(other, source_of(one)) == expected_tokens(PROMPT, 4)
        assert (one.engine.stats().num_blocks_given, other.engine.stats().num_blocks_taken) == (7, 7)
        assert other.engine.stats().num_cached_tokens == 28
        assert other.fetcher._pace._measured_s > 0
        await until(lambda: not other.fetcher._tasks and not one.block_server._giving)
        for made in (one, other):
            assert made.engine.stats().num_allocated_blocks == 0
            made.engine.check_invariants()


async def no_listener(one: Replica) -> BlockSource:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return BlockSource(*closed.getsockname()[:2], 7)


async def dead(one: Replica) -> BlockSource:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await receive(reader, BlocksWanted)
        writer.write(frame(Coming(2, ("fake",), (10**6,))))
        writer.close()

    return await listening(hang_up)


async def nonsense(one: Replica) -> BlockSource:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 100)
        writer.close()

    return await listening(talk)


async def silent(one: Replica) -> BlockSource:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    return await listening(say_nothing)


async def wrong_count(one: Replica) -> BlockSource:
    async def give_too_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await receive(reader, BlocksWanted)
        await send_blocks(writer, 9, one.executor.read_blocks(range(9)))
        writer.close()

    return await listening(give_too_many)


async def other_model(one: Replica) -> BlockSource:
    one.block_server._model = "another"
    return source_of(one)


async def has_lost_them(one: Replica) -> BlockSource:
    await one.engine.add(make_request("large", range(253), max_tokens=1))
    return source_of(one)


async def listening(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> BlockSource:
    SERVERS.append(await asyncio.start_server(serve, "127.0.0.1", 0))
    return BlockSource(*SERVERS[-1].sockets[0].getsockname()[:2], 7)


SERVERS: list[asyncio.Server] = []


@pytest.mark.parametrize(
    "fails", [no_listener, dead, nonsense, silent, wrong_count, other_model, has_lost_them], ids=lambda f: f.__name__
)
async def test_blocks_that_do_not_come_are_computed(
    fails: Callable[[Replica], Awaitable[BlockSource]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetcher, "UNKNOWN_S", 0.2)
    async with replica(max_model_len=256) as one, replica() as other:
        await one.engine.add(REQUEST)
        source = await fails(one)
        with await followed(other):
            assert await answered(other, source) == expected_tokens(PROMPT, 4)
        assert other.engine.stats().num_cached_tokens == other.engine.stats().num_blocks_taken == 0
        has_failed = fails not in (other_model, has_lost_them)
        assert ((source.host, source.port) in other.fetcher._failed) == has_failed
        assert other.fetcher.num_coming(make_request("s", PROMPT, block_hashes=HASHES), source) == 0
        other.engine.check_invariants()
    while SERVERS:
        SERVERS.pop().close()


async def test_a_request_that_is_over_ends_its_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fetcher, "UNKNOWN_S", 600.0)
    async with replica() as one, replica() as other:
        source = await silent(one)
        with await followed(other):
            for end in ("left", "handed back", "stopped"):
                call = asyncio.create_task(other.call(replace(REQUEST, request_id=end), "g", source))
                await until(lambda: other.fetcher._tasks)
                if end == "left":
                    call.cancel()
                elif end == "handed back":
                    assert other.engine.hand_back(end)
                else:
                    await other.engine.stop()
                await asyncio.wait([call])
                await until(lambda: not other.fetcher._tasks)
        while SERVERS:
            SERVERS.pop().close()


@pytest.mark.parametrize("wanted", [b"", b"\xff" * 4, frame(Coming()), (MAX_FRAME_BYTES + 1).to_bytes(4, "big")])
async def test_the_server_survives_whatever_it_is_told(wanted: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "GIVE_S", 0.2)
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        reader, writer = await asyncio.open_connection(*one.blocks_address)
        writer.write(wanted)
        if wanted:
            assert await reader.read() == b""  # it hangs up
        writer.close()
        await until(lambda: not one.block_server._giving)
        with await followed(other):
            await answered(other, source_of(one))
        assert other.engine.stats().num_blocks_taken == 7


async def test_one_that_reads_nothing_holds_no_blocks_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "GIVE_S", 0.2)
    async with replica() as one:
        await one.engine.add(REQUEST)

        def huge(block_ids: object) -> tuple[BlockPart, ...]:
            return (BlockPart("fake", memoryview(bytes(10**7))),)

        one.executor.read_blocks = huge  # type: ignore[method-assign]
        _, writer = await asyncio.open_connection(*one.blocks_address, limit=2)
        writer.write(frame(BlocksWanted("model", HASHES, 0)))
        await until(lambda: one.engine.stats().num_allocated_blocks > 0)
        await until(lambda: one.engine.stats().num_allocated_blocks == 0)
        await until(lambda: not one.block_server._giving)
        writer.close()


async def test_more_than_so_many_at_once_get_none_and_idle_connections_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_server, "MAX_AT_ONCE", 1)
    async with replica() as one:
        await one.engine.add(REQUEST)
        (_, idle), (reader, writer) = [await asyncio.open_connection(*one.blocks_address) for _ in range(2)]
        writer.write(frame(BlocksWanted("model", HASHES, 5)))
        num_blocks, parts = await receive_blocks(reader)
        assert (num_blocks, len(parts)) == (2, 1)
        monkeypatch.setattr(block_server, "MAX_AT_ONCE", 0)
        other_reader, other = await asyncio.open_connection(*one.blocks_address)
        other.write(frame(BlocksWanted("model", HASHES, 0)))
        assert await receive_blocks(other_reader) == (0, ())
        for each in (idle, writer, other):
            each.close()


async def test_what_is_being_given_comes_to_its_end_when_the_replica_stops() -> None:
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        _, idle = await asyncio.open_connection(*one.blocks_address)
        one.executor.gate.clear()
        step = one.engine.add(make_request("holds up the copies", (1, 2, 3)))
        await until(lambda: one.executor.is_held)
        with await followed(other):
            call = asyncio.create_task(answered(other, source_of(one)))
            await until(lambda: one.block_server._giving)
            closing = asyncio.create_task(one.block_server.close())
            one.executor.gate.set()
            assert await call == expected_tokens(PROMPT, 4)
        await closing
        await step
        assert other.engine.stats().num_blocks_taken == 7
        idle.close()


async def test_requests_that_lack_the_same_blocks_fetch_them_once() -> None:
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        with await followed(other):
            calls = [other.call(replace(REQUEST, request_id=f"r{n}"), "g", source_of(one)) for n in range(6)]
            for outcome in await asyncio.gather(*calls):
                assert not outcome.refused
        assert other.engine.stats().num_blocks_taken == 7
        assert other.engine.stats().num_cached_tokens == 6 * 28
        assert other.fetcher._num_blocks == 0


async def test_any_error_releases_the_request() -> None:
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)

        def fail(*_: object) -> None:
            raise OverflowError("a bug")

        other.executor.write_blocks = fail  # type: ignore[method-assign]
        with await followed(other):
            assert await answered(other, source_of(one)) == expected_tokens(PROMPT, 4)


async def test_lack_of_room_here_is_not_the_other_replicas_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_table, "LEAST_LEFT", 1)  # the whole pool
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        with await followed(other):
            assert await answered(other, source_of(one)) == expected_tokens(PROMPT, 4)
        assert other.engine.stats().num_blocks_taken == 0
        assert not other.fetcher._failed


async def test_a_turn_that_does_not_come_is_not_the_other_replicas_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fetcher, "MOST_S", 0.05)
    async with replica() as one, replica() as other:
        await one.engine.add(REQUEST)
        with await followed(other):
            async with other.fetcher._turn:  # another fetch, which takes long
                assert await answered(other, source_of(one)) == expected_tokens(PROMPT, 4)
        assert other.engine.stats().num_blocks_taken == 0
        assert not other.fetcher._failed


def test_one_slow_transfer_is_forgotten() -> None:
    pace = TransferPace(0.0007)
    pace.take(2, 0.405, now=100.0)
    is_worth = partial(pace.is_worth, 64, 0, has_begun=False, block_compute_s=0.016)
    assert not is_worth(now=100.0)
    assert is_worth(now=100.0 + 5 * FORGET_S)
    pace.take(64, START_S + 64 * 0.0001, now=10_000.0)
    assert pace.block_s(now=10_100.0) == pytest.approx(0.0007 - 0.3 * 0.0006)  # a faster one is not


async def test_only_what_comes_sooner_than_it_is_computed_is_fetched() -> None:
    async with replica() as one:
        fetcher, source = one.fetcher, BlockSource("127.0.0.1", 1, 7)
        assert fetcher.num_coming(REQUEST, source)  # nothing is known
        assert not fetcher.num_coming(REQUEST, None)
        assert not fetcher.num_coming(replace(REQUEST, block_hashes=()), source)
        assert not fetcher.num_coming(make_request("r", PROMPT[:4], block_hashes=HASHES[:1]), source)  # the last token
        one.engine._pace._token_s = 0.001  # 28 tokens take 28 ms, and to ask 5
        fetcher._pace._mean_s = fetcher._pace._assumed_s = 0.001
        assert fetcher.num_coming(REQUEST, source)
        fetcher._pace._mean_s = fetcher._pace._assumed_s = 0.002
        assert not fetcher.num_coming(REQUEST, source)
        fetcher._pace._mean_s = fetcher._pace._assumed_s = 0.001
        await one.engine.add(make_request("before", PROMPT[:13], max_tokens=1))
        one.engine._pace._token_s = 0.001
        assert not fetcher.num_coming(REQUEST, source)  # four blocks are left


def test_the_offer_is_of_the_replica_with_the_most_blocks_that_can_be_reached() -> None:
    def offer(*matched: int, **of_last: bool) -> BlockOffer | None:
        rows = [make_row(name, num_matched_blocks=count) for name, count in zip("abc", matched, strict=True)]
        return best_offer(Candidates.of([*rows[:2], replace(rows[2], **of_last)]), "a")

    assert offer(1, 2, 3) == BlockOffer("c", 3)
    assert offer(1, 2, 3, connected=False) == BlockOffer("b", 2)
    assert offer(1, 2, 3, stalled=True) == BlockOffer("b", 2)
    assert offer(3, 2, 3) is None
    assert offer(0, 0, 0) is None


async def test_through_the_gateway_a_prompt_that_must_go_elsewhere_takes_its_blocks_along() -> None:
    async with serving("a", "b") as serve:
        first: Answer = await ask(serve, "first", prompt_token_ids=PROMPT)
        owner = serve.taken_by("first")
        await serve.replicas[owner].engine.drain(1.0)  # it takes nothing new, and gives what it has
        await until(lambda: serve.ledger.view.present(0.0).has_open({owner}))
        second = await ask(serve, "second", prompt_token_ids=PROMPT)
        assert second.tokens == first.tokens == [expected_tokens(PROMPT, 4)]
        assert serve.taken_by("second") != owner
        assert serve.replicas[serve.taken_by("second")].engine.stats().num_blocks_taken == 7
        assert second.usage is not None
        assert second.usage.num_cached_tokens == 28
