"""The feed over real loopback sockets: what a gateway hears, and what becomes of its requests when it is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop
from fixtures.engines import finished, running_engine
from fixtures.replicas import Replica, replica
from fixtures.waiting import DEADLINE_S, until

from shoal_cluster.serve import feed as feed_module
from shoal_cluster.serve import feed_messages
from shoal_cluster.serve.feed_client import MIN_REDIAL_S, FeedClient
from shoal_cluster.serve.feed_messages import Abort, Promise, Snapshot, Subscribe, Update
from shoal_cluster.serve.outcome import Outcome
from shoal_replica.frames import frame
from shoal_replica.request import FinishReason
from shoal_replica.testing import expected_tokens, make_request

ABORT = FinishReason.ABORT


class Gateway:
    """A client of the feed that mirrors what it hears."""

    def __init__(self, gateway_id: str, address: tuple[str, int]) -> None:
        self.snapshots: list[Snapshot] = []
        self.updates: list[Update] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.accepted: list[str] = []
        self.hashes: set[bytes] = set()
        self.num_lost = 0
        self.client = FeedClient(gateway_id, address, self._take, self._lose)

    def _take(self, message: Snapshot | Update) -> None:
        if isinstance(message, Snapshot):
            self.snapshots.append(message)
            self.hashes = set(message.hashes)
            return
        self.updates.append(message)
        self.hashes.difference_update(message.removed)
        self.hashes.update(message.stored)
        self.accepted.extend(message.accepted)
        for delta in message.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason

    def _lose(self) -> None:
        self.num_lost += 1


@asynccontextmanager
async def gateway(gateway_id: str, of: Replica) -> AsyncIterator[Gateway]:
    made = Gateway(gateway_id, of.address)
    try:
        await until(lambda: made.snapshots)
        yield made
    finally:
        await made.client.close()


@asynccontextmanager
async def raw(of: Replica, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection to the feed that sends ``data`` and nothing else."""
    reader, writer = await asyncio.open_connection(*of.address)
    writer.write(data)
    try:
        yield reader
    finally:
        writer.close()


async def test_first_a_snapshot_then_updates_without_a_gap() -> None:
    async with replica() as one:
        await finished(one.engine.add(make_request("before", range(20))))
        async with gateway("g", one) as g:
            [snapshot] = g.snapshots
            assert set(snapshot.hashes) == set(one.engine.cache_hashes())
            assert len(snapshot.hashes) == 5
            assert snapshot.stats.num_finished == 1
            assert await one.run("r", "g", prompt_token_ids=range(50, 70)) == Outcome(refused=False)
            await until(lambda: "r" in g.reasons)
            assert [update.seq for update in g.updates] == list(range(snapshot.seq + 1, len(g.updates) + 1))
            assert g.accepted == ["r"]
            assert g.tokens["r"] == expected_tokens(range(50, 70), 4)
            assert g.hashes == set(one.engine.cache_hashes())
            assert g.updates[-1].stats.num_finished == 2


async def test_tokens_are_passed_on_before_the_books_and_both_in_order() -> None:
    tokens, heard, known = list[int](), list[int](), list[int]()

    def hear(message: Snapshot | Update) -> None:
        heard.append(message.seq)
        known.append(len(tokens))

    async with replica() as one:
        client = FeedClient("g", one.address, hear, lambda: None, lambda update: tokens.append(update.seq))
        await until(lambda: heard)
        await one.run("r", "g", max_tokens=9)
        await until(lambda: tokens and heard[-1] > tokens[-1] and len(tokens) >= 9)
        assert heard == list(range(heard[0], heard[0] + len(heard)))
        assert tokens == sorted(set(tokens))
        assert all(known[heard.index(seq)] > number for number, seq in enumerate(tokens))
        await client.close()


async def test_who_has_no_token_yet_and_who_has_the_last_come_before_those_in_the_midst_of_it() -> None:
    async with replica() as one, gateway("g", one) as g:
        one.executor.gate.clear()
        early = one.run("early", "g", prompt_token_ids=(1,), max_tokens=20)
        await until(lambda: one.executor.is_held)
        others = [one.run(f"late{i}", "g", prompt_token_ids=(2 + i,), max_tokens=9) for i in (0, 1)]
        await until(lambda: one.engine.stats().num_waiting == 2)
        one.executor.gate.set()
        await asyncio.gather(early, *others)
        await until(lambda: len(g.reasons) == 3)
        shared = [update.deltas for update in g.updates if len(update.deltas) == 3]
        orders = [[delta.request_id for delta in deltas] for deltas in shared]
        assert sorted(orders[0]) == sorted(orders[-1]) == ["early", "late0", "late1"]
        assert [deltas[-1].request_id for deltas in (shared[0], shared[-1])] == ["early", "early"]
        assert all(delta.start is not None for delta in shared[0][:2])
        assert all(delta.finish_reason is not None for delta in shared[-1][:2])


async def test_tokens_go_to_their_owner_alone_and_news_to_all() -> None:
    async with replica() as one, gateway("a", one) as a, gateway("b", one) as b:
        await asyncio.gather(one.run("ra", "a", prompt_token_ids=(1,)), one.run("rb", "b", prompt_token_ids=(2,)))
        await until(lambda: a.reasons and b.reasons)
        assert (set(a.tokens), set(b.tokens)) == ({"ra"}, {"rb"})
        assert (a.accepted, b.accepted) == (["ra"], ["rb"])
        await until(lambda: a.updates[-1].stats.num_finished == b.updates[-1].stats.num_finished == 2)
        assert a.hashes == b.hashes


async def test_an_idle_replica_says_often_that_its_last_stats_are_still_true() -> None:
    async with replica(heartbeat_s=60.0) as one, gateway("g", one) as g:
        await until(lambda: len(g.updates) >= 5)
        assert {update.stats for update in g.updates[1:]} == {None}
        await one.run("r", "g")
        await until(lambda: g.reasons and g.updates[-1].stats is None)
        told = [update.stats for update in g.updates if update.stats is not None]
        assert msgspec.structs.replace(told[-1], time_s=0.0) == msgspec.structs.replace(one.engine.stats(), time_s=0.0)


async def test_a_long_step_is_reported_on_as_it_began() -> None:
    async with replica() as one, gateway("g", one) as g:
        one.executor.gate.clear()
        running = one.run("r", "g", prompt_token_ids=range(30))
        await until(lambda: g.accepted)
        assert g.updates[-1].stats is not None
        assert g.updates[-1].stats.num_running == 1
        one.executor.gate.set()
        await running


async def test_a_request_of_a_gateway_that_is_not_connected_is_refused_and_leaves_nothing() -> None:
    async with replica() as one:
        outcome = await one.run("r", "nobody")
        assert outcome == Outcome(refused=True, reason="the gateway's feed is not connected", is_unheard=True)
        assert one.engine.stats().num_waiting == 0
        assert await one.engine.drain(5.0)


async def test_a_refusal_by_the_engine_is_not_announced() -> None:
    async with replica() as one, gateway("g", one) as g:
        await one.engine.drain(5.0)
        assert await one.run("r", "g") == Outcome(refused=True, reason="the replica is draining")
        num_before = len(g.updates)
        await until(lambda: len(g.updates) >= num_before + 2)  # one may have been on its way already
        assert g.accepted == []
        told = [update.stats for update in g.updates if update.stats is not None]
        assert told[-1].draining


async def test_the_requests_of_a_gateway_that_is_gone_are_aborted() -> None:
    async with replica() as one, gateway("stays", one) as stays:
        async with gateway("goes", one):
            one.executor.gate.clear()
            gone = [one.run(f"gone{i}", "goes", prompt_token_ids=range(20), max_tokens=100, n=2) for i in range(3)]
            kept = one.run("kept", "stays", prompt_token_ids=range(7), max_tokens=20)
            await until(lambda: one.executor.is_held)
        await asyncio.gather(*gone)
        assert one.engine.stats().num_running + one.engine.stats().num_waiting == 1, "freed before the step ended"
        one.executor.gate.set()
        await kept
        await until(lambda: stays.reasons)
        assert stays.tokens == {"kept": expected_tokens(range(7), 20)}
        assert {reason for (name, _), reason in one.recorder.reasons.items() if name != "kept"} == {ABORT}
        assert one.engine.stats().num_allocated_blocks == 0


async def test_a_gateway_that_dials_again_gets_a_new_snapshot_and_loses_its_requests() -> None:
    async with replica() as one, gateway("g", one) as g:
        one.executor.gate.clear()
        running = one.run("r", "g", prompt_token_ids=range(9), max_tokens=50)
        await until(lambda: one.executor.is_held)
        one.feed._subscribers["g"].transport.abort()
        await until(lambda: len(g.snapshots) == 2)
        await running
        assert g.num_lost == 1
        assert one.recorder.reasons == {("r", 0): ABORT}
        one.executor.gate.set()
        await one.run("again", "g", prompt_token_ids=range(9))
        await until(lambda: "again" in g.reasons)
        assert g.tokens["again"] == expected_tokens(range(9), 4)
        assert g.snapshots[1].seq == 0
        assert g.hashes == set(one.engine.cache_hashes())


async def test_a_second_connection_of_a_gateway_replaces_the_first() -> None:
    subscribe = frame(Subscribe("g"))
    async with replica() as one, raw(one, subscribe) as older:
        await until(lambda: "g" in one.feed._subscribers)
        first = one.feed._subscribers["g"]
        one.executor.gate.clear()
        running = one.run("r", "g", prompt_token_ids=range(9))
        await until(lambda: one.executor.is_held)
        async with raw(one, subscribe) as younger:
            await running
            assert one.recorder.reasons == {("r", 0): ABORT}
            await _rest(older)
            assert one.feed._subscribers["g"] is not first
            assert await younger.readexactly(4)


async def test_a_stop_hangs_up_on_everybody() -> None:
    async with replica() as one, gateway("g", one) as g, raw(one, b"") as undecided:
        one.executor.gate.clear()
        running = one.run("r", "g", prompt_token_ids=range(9))
        await until(lambda: one.executor.is_held and len(one.feed._connections) == 2)
        async with asyncio.timeout(feed_messages.SILENCE_S / 2):  # sooner than anybody's silence timeout
            await one.feed.stop()
        await until(lambda: g.num_lost)
        await running
        assert one.recorder.reasons == {("r", 0): ABORT}
        assert await _rest(undecided) == b""
        assert not one.feed._connections


async def test_one_sequence_is_aborted_by_its_gateway_only() -> None:
    async with replica() as one, gateway("a", one) as a, gateway("b", one) as b:
        one.executor.gate.clear()
        running = one.run("r", "a", prompt_token_ids=range(9), max_tokens=20, n=2)
        await until(lambda: one.executor.is_held)
        one.executor.gate.set()
        await until(lambda: one.recorder.tokens["r", 1])
        one.executor.gate.clear()
        await until(lambda: one.executor.is_held)
        b.client.abort("r", 0)
        a.client.abort("r", 1)
        await until(lambda: one.recorder.reasons)
        assert one.recorder.reasons == {("r", 1): ABORT}
        one.executor.gate.set()
        await running
        assert one.recorder.reasons["r", 0] is FinishReason.LENGTH


async def test_one_request_is_recalled_by_its_gateway_only() -> None:
    async with replica(max_num_seqs=1) as one, gateway("a", one) as a, gateway("b", one) as b:
        one.executor.gate.clear()
        runs = one.run("runs", "a", prompt_token_ids=range(9))
        await until(lambda: one.executor.is_held)
        waits = one.run("waits", "a", prompt_token_ids=range(9))
        await until(lambda: one.engine.stats().num_waiting)
        b.client.recall("waits")
        b.client.promise("next", 1, 1)
        await until(lambda: one.feed._subscribers["b"].promises)
        assert one.engine.stats().num_waiting == 1
        a.client.recall("waits")
        assert (await waits).refused
        one.executor.gate.set()
        await runs


async def test_a_promise_that_comes_after_its_request_counts_for_nothing() -> None:
    async with replica() as one, gateway("a", one) as a:
        one.executor.gate.clear()
        running = one.run("r", "a", prompt_token_ids=range(9))
        await until(lambda: one.executor.is_held)
        a.client.promise("r", 3, 9)
        a.client.promise("next", 2, 5)
        await until(lambda: "next" in one.feed._subscribers["a"].promises)
        assert one.feed._subscribers["a"].promises.keys() == {"next"}
        one.executor.gate.set()
        await running


async def test_cancelling_the_call_frees_its_blocks() -> None:
    async with replica() as one, gateway("g", one):
        one.executor.gate.clear()
        running = one.run("r", "g", prompt_token_ids=range(30))
        await until(lambda: one.executor.is_held)
        running.cancel()
        await until(running.done)
        assert one.engine.stats().num_allocated_blocks == 0
        assert one.feed._subscribers["g"].request_ids == set()


async def test_an_id_in_use_does_not_change_hands() -> None:
    async with replica() as one, gateway("a", one) as a, gateway("b", one) as b:
        one.executor.gate.clear()
        running = one.run("r", "a", max_tokens=3)
        await until(lambda: one.executor.is_held)
        assert (await one.run("r", "b")).field == "request_id"
        one.executor.gate.set()
        await running
        await until(lambda: a.reasons)
        assert len(a.tokens["r"]) == 3
        assert b.tokens == {}


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x04junk",
        b"\x00\x00\x00\x00",
        b"\x00\x01\x00\x01" + b"x" * 65_537,
        frame(Abort("r", 0)),
        frame(Snapshot(0, None, ())),  # type: ignore[arg-type]
        frame(Subscribe("g"))[:-3],
    ],
)
async def test_garbage_is_hung_up_on(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_messages, "SILENCE_S", 0.05)
    async with replica() as one:
        async with raw(one, garbage) as reader:
            assert await _rest(reader) == b""
        assert one.feed._subscribers == {}
        monkeypatch.undo()
        async with gateway("g", one) as g:
            await one.run("r", "g")
            await until(lambda: g.reasons)


async def test_garbage_from_a_subscriber_ends_its_requests_and_nobody_elses() -> None:
    async with replica() as one, gateway("good", one) as good:
        reader, writer = await asyncio.open_connection(*one.address)
        writer.write(frame(Subscribe("bad")))
        await until(lambda: "bad" in one.feed._subscribers)
        one.executor.gate.clear()
        doomed, kept = one.run("doomed", "bad"), one.run("kept", "good")
        await until(lambda: one.executor.is_held)
        writer.write(b"\x00\x00\x00\x02{}")
        await doomed
        assert "bad" not in one.feed._subscribers
        await _rest(reader)
        one.executor.gate.set()
        await kept
        await until(lambda: good.reasons)
        assert len(good.tokens["kept"]) == 4
        writer.close()


async def test_a_gateway_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_BACKLOG_BYTES", 64 * 2**10)
    sleepy = frame(Subscribe("sleeps"))
    async with replica() as one, gateway("reads", one) as reads, raw(one, sleepy):
        await until(lambda: "sleeps" in one.feed._subscribers)
        one.executor.gate.clear()
        running = one.run("r", "sleeps", prompt_token_ids=range(9))
        await until(lambda: one.executor.is_held)
        one.feed._subscribers["sleeps"].transport.write(b"\x00" * 2**25)  # more than the sockets and the reader buffer
        one.executor.gate.set()
        await running
        assert one.recorder.reasons["r", 0] is ABORT
        assert "sleeps" not in one.feed._subscribers
        await one.run("other", "reads")
        await until(lambda: reads.reasons)
        assert reads.num_lost == 0


async def test_a_gateway_whose_host_takes_nothing_more_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when that host has vanished: its requests end, and the others hear no more of its promises."""
    monkeypatch.setattr(feed_messages, "SILENCE_S", 0.3)
    async with replica() as one, gateway("reads", one) as reads:
        with socket.socket() as vanished:
            vanished.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            vanished.connect(one.address)
            vanished.sendall(frame(Subscribe("vanishes")) + frame(Promise("r", 7, 25)))
            await until(lambda: reads.updates and reads.updates[-1].promised.num_blocks == 7)
            one.feed._subscribers["vanishes"].transport.write(b"\x00" * 2**23)
            await until(lambda: "vanishes" not in one.feed._subscribers)
            await until(lambda: reads.updates[-1].promised.num_blocks == 0)


class TestClient:
    """The gateway's end of the feed, against a replica that misbehaves."""

    @asynccontextmanager
    async def talking_to(self, *scripts: bytes) -> AsyncIterator[Gateway]:
        """A gateway whose every connection is sent the next script, and nothing after the last one."""
        left = list(scripts)
        writers = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            if left:
                writer.write(left.pop(0))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        made = Gateway("g", server.sockets[0].getsockname())
        try:
            yield made
        finally:
            await made.client.close()
            server.close()
            for writer in writers:
                writer.close()

    async def test_a_gap_is_answered_by_dialling_again(self) -> None:
        async with running_engine() as (engine, _, _):
            frames = [Snapshot(0, engine.stats(), ()), *(Update(seq, engine.stats()) for seq in (1, 2, 4, 5))]
            script = b"".join(map(frame, frames))
            async with self.talking_to(script, frame(Snapshot(7, engine.stats(), (b"h" * 16,)))) as g:
                await until(lambda: len(g.snapshots) == 2)
                assert [update.seq for update in g.updates] == [1, 2]
                assert g.num_lost == 1
                assert g.hashes == {b"h" * 16}

    async def test_an_update_before_any_snapshot_is_not_taken(self) -> None:
        async with running_engine() as (engine, _, _):
            script = frame(Update(1, engine.stats()))
            async with self.talking_to(script) as g:
                await until(lambda: g.num_lost)
                assert g.updates == []

    async def test_after_good_news_it_soon_dials_again(self) -> None:
        async with running_engine() as (engine, _, _):
            script = frame(Snapshot(0, engine.stats(), ())) + frame(Update(5, engine.stats()))
            async with self.talking_to(*[script] * 4) as g:
                await until(lambda: len(g.snapshots) == 4)
                assert g.client._delay_s <= 2 * MIN_REDIAL_S

    @pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01{", b"\x00\x00"])
    async def test_garbage_and_silence_are_a_loss(self, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feed_messages, "SILENCE_S", 0.05)
        async with self.talking_to(garbage) as g:
            await until(lambda: g.num_lost >= 2)
            assert g.snapshots == []

    async def test_who_is_let_in_by_a_replica_that_stops_is_hung_up_on(self) -> None:
        async with replica() as one:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: feed_module._Connection(one.feed), "127.0.0.1", 0)
            await one.feed.stop()
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            async with asyncio.timeout(feed_module.feed_messages.SILENCE_S / 2):  # after that it would hang up anyway
                assert await reader.read() == b""
            writer.close()
            server.close()

    async def test_waits_for_a_replica_that_is_not_up_yet(self) -> None:
        async with replica() as one:
            host, port = one.address
            await one.feed.stop()
            late = Gateway("g", (host, port))
            await until(lambda: late.num_lost >= 2)
            feed = feed_module.FeedServer(one.engine)
            feed._unsubscribe = one.engine.subscribe(feed._publish)  # started, but on a known port
            server = await asyncio.get_running_loop().create_server(lambda: feed_module._Connection(feed), host, port)
            await until(lambda: late.snapshots)
            await late.client.close()
            server.close()
            await feed.stop()

    def test_what_is_sent_to_one_that_has_just_died_is_lost_quietly(self) -> None:
        """Serve's loops are uvloop's, whose transports raise once they are closed: a call that is to go on elsewhere
        must not end by that.
        """

        async def send_while_it_breaks() -> list[bool]:
            is_over = asyncio.Event()

            class Silent(asyncio.Protocol):
                def connection_lost(self, error: Exception | None) -> None:
                    is_over.set()

            server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
            client = FeedClient("g", server.sockets[0].getsockname(), lambda message: None, lambda: None)
            await until(lambda: client.is_open)
            assert client._connection is not None
            client._connection.transport.abort()
            were_sent = []
            while client.is_open:
                were_sent.append(client.submit(make_request("r", range(9))))
                client.withdraw("r")
                client.abort("r")
                await asyncio.sleep(0)
            await client.close()
            await is_over.wait()
            server.close()
            return were_sent

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            were_sent = runner.run(send_while_it_breaks())
        assert were_sent
        assert not any(were_sent)

    async def test_closing_ends_its_task(self) -> None:
        tasks = asyncio.all_tasks()
        async with replica() as one:
            g = Gateway("g", one.address)
            await until(lambda: g.snapshots)
            await g.client.close()
            g.client.abort("r", 0)
            await until(lambda: "g" not in one.feed._subscribers)
        assert asyncio.all_tasks() == tasks


async def test_every_message_crosses_the_wire_unchanged() -> None:
    async with replica() as one, gateway("g", one) as g:
        await one.run("r", "g", n=2)
        await until(lambda: g.updates)
        for message in (*g.snapshots, *g.updates):
            assert msgspec.msgpack.decode(frame(message)[4:], type=type(message)) == message


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """What is left to read until the other end hangs up; a reset counts as hanging up."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""


async def test_a_snapshot_beyond_the_backlog_comes_through_while_updates_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica of millions of blocks begins with a long snapshot; its reader is not cut off as if it did not read."""
    monkeypatch.setattr(feed_module, "MAX_BACKLOG_BYTES", 64 * 2**10)
    async with replica() as one:
        hashes = tuple(i.to_bytes(16, "big") for i in range(2**20))  # more than the sockets buffer
        monkeypatch.setattr(one.engine, "cache_hashes", lambda: hashes)
        heard: list[object] = []
        client = FeedClient("g", one.address, heard.append, lambda: heard.append(None))
        try:
            await until(lambda: "g" in one.feed._subscribers)
            for _ in range(3):
                one.engine._publish(())
            await until(lambda: heard)
            assert heard[0] is not None, "it was cut off before it could read its snapshot"
            await until(lambda: len(heard) > 3)
            assert None not in heard
        finally:
            await client.close()
