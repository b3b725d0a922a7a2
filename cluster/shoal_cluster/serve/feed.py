"""The feed: one socket from a replica to each gateway, written once per engine step.

A replica sends a ``Snapshot`` when a gateway dials, then ``Update``s numbered without a gap. A gateway that sees a gap,
or hears nothing for ``SILENCE_S``, dials again. Frames are msgpack behind a four-byte length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from shoal_replica.engine import Engine, StepReport
from shoal_replica.errors import Unavailable
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import TokenDelta
from shoal_replica.stats import ReplicaStats

SILENCE_S = 5.0
BLOCKS, PAST = "blocks", "past"  # what a gateway may ask: a BlockMap; the replica's PastSamples
MIN_REDIAL_S, MAX_REDIAL_S = 0.02, 1.0
MAX_BACKLOG_BYTES = 32 * 2**20
MAX_FRAME_BYTES = 256 * 2**20  # a snapshot of millions of blocks
MAX_REQUEST_BYTES = 64 * 2**10  # what a gateway sends is short


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """A gateway's first frame."""

    gateway_id: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """A gateway wants no more of one sequence (its text has met a stop string)."""

    request_id: str
    index: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A gateway asks for something that updates do not carry. Questions are those of ``FeedServer``'s ``answers``."""

    number: int
    question: str


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The whole ledger: every cached block and the stats. The next update has number ``seq + 1``."""

    seq: int
    stats: ReplicaStats
    hashes: tuple[BlockHash, ...]


class Update(msgspec.Struct, frozen=True, tag="update"):
    """One step: blocks stored and removed, stats after it, the gateway's own tokens, its newly accepted requests."""

    seq: int
    stats: ReplicaStats
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    deltas: tuple[TokenDelta, ...] = ()
    accepted: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To the question of that number; empty where nobody here knows it. It takes no part in the updates' numbering."""

    number: int
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_from_gateway = msgspec.msgpack.Decoder(Subscribe | Abort | Ask)
_from_replica = msgspec.msgpack.Decoder(Snapshot | Update | Answer)


def _frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > max_bytes:
        raise ConnectionError(f"a feed frame of {size} bytes is over {max_bytes}")
    return await reader.readexactly(size)


class _Subscriber:
    """A connected gateway, its request ids, and its place in the numbering."""

    def __init__(self, gateway_id: str, writer: asyncio.StreamWriter) -> None:
        self.gateway_id = gateway_id
        self.writer = writer
        self.seq = 0
        self.request_ids: set[str] = set()
        self.accepted: list[str] = []


class FeedServer:
    """The replica's end. Requests belong to the gateway that sent them; when it is gone, they are aborted.

    ``answers`` makes the body of the answer to each question that a gateway may ask.
    """

    def __init__(self, engine: Engine, answers: Mapping[str, Callable[[], bytes]] | None = None) -> None:
        self._engine = engine
        self._answers = answers or {}
        self._subscribers: dict[str, _Subscriber] = {}
        self._server: asyncio.Server | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> tuple[str, int]:
        """Listen on a free port of ``host``; returns the address."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        self._unsubscribe = self._engine.subscribe(self._publish)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    def own(self, request_id: str, gateway_id: str) -> bool:
        """Send a request's tokens to ``gateway_id``. False if that gateway is not connected."""
        subscriber = self._subscribers.get(gateway_id)
        if subscriber is None:
            return False
        subscriber.request_ids.add(request_id)
        subscriber.accepted.append(request_id)
        return True

    def disown(self, request_id: str, gateway_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        if (subscriber := self._subscribers.get(gateway_id)) is not None:
            subscriber.request_ids.discard(request_id)

    async def stop(self) -> None:
        """Close every connection; what they still buffer is sent as far as the gateways read."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer), name="shoal-feed-connection")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subscriber: _Subscriber | None = None
        try:
            async with asyncio.timeout(SILENCE_S):
                first = _from_gateway.decode(await _read(reader, MAX_REQUEST_BYTES))
            if not isinstance(first, Subscribe):
                return
            if (older := self._subscribers.pop(first.gateway_id, None)) is not None:
                self._forget(older)
                older.writer.transport.abort()
            snapshot = Snapshot(0, self._engine.stats(), self._engine.cache_hashes())
            subscriber = _Subscriber(first.gateway_id, writer)
            self._subscribers[first.gateway_id] = subscriber
            writer.write(_frame(snapshot))
            while True:
                message = _from_gateway.decode(await _read(reader, MAX_REQUEST_BYTES))
                if isinstance(message, Abort) and message.request_id in subscriber.request_ids:
                    self._engine.abort(message.request_id, message.index)
                elif isinstance(message, Ask):
                    answer = self._answers.get(message.question, bytes)
                    writer.write(_frame(Answer(message.number, answer())))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError):
            return
        finally:
            writer.close()
            if subscriber is not None and self._subscribers.get(subscriber.gateway_id) is subscriber:
                del self._subscribers[subscriber.gateway_id]
                self._forget(subscriber)

    def _forget(self, subscriber: _Subscriber) -> None:
        for request_id in tuple(subscriber.request_ids):
            self._engine.abort(request_id)

    def _publish(self, report: StepReport) -> None:
        for subscriber in tuple(self._subscribers.values()):
            if subscriber.writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                subscriber.writer.transport.abort()  # it will dial again and take a snapshot
                continue
            subscriber.seq += 1
            accepted, subscriber.accepted = tuple(subscriber.accepted), []
            deltas = tuple(d for d in report.deltas if d.request_id in subscriber.request_ids)
            update = Update(subscriber.seq, report.stats, report.stored, report.removed, deltas, accepted)
            subscriber.writer.write(_frame(update))


class FeedClient:
    """The gateway's end for one replica: follows the feed, dialling again whenever it breaks, until closed."""

    def __init__(
        self,
        gateway_id: str,
        address: tuple[str, int],
        on_message: Callable[[Snapshot | Update], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._gateway_id = gateway_id
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._delay_s = MIN_REDIAL_S
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._num_asked = 0
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"shoal-feed-{address[1]}")

    def abort(self, request_id: str, index: int) -> None:
        """Ask the replica to end one sequence; when the feed is down it is ended anyway."""
        if self._writer is not None:
            self._writer.write(_frame(Abort(request_id, index)))

    async def ask(self, question: str, timeout_s: float) -> bytes:
        """The replica's answer.

        Raises:
            Unavailable: the feed is down or breaks, the replica does not know the question, or is silent.
        """
        if self._writer is None:
            raise Unavailable("the replica's feed is not connected")
        self._num_asked += 1
        number = self._num_asked
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_frame(Ask(number, question)))
            async with asyncio.timeout(timeout_s):
                body: bytes = await answer
        except TimeoutError:
            raise Unavailable(f"the replica did not answer within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)
        if not body:
            raise Unavailable(f"the replica cannot answer {question!r}")
        return body

    def check_health(self) -> None:
        """Raise if following has ended, which only a bug does."""
        if self._task.done():
            raise RuntimeError(f"the feed of {self._address} is no longer followed: {self._task}")

    def close(self) -> Awaitable[object]:
        """Stop following. The result may be awaited for the end of the task."""
        self._task.cancel()
        return asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    reader, self._writer = await asyncio.open_connection(*self._address)
                self._writer.write(_frame(Subscribe(self._gateway_id)))
                await self._receive(reader)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError):
                pass  # dial again; the view shows the replica as disconnected meanwhile
            finally:
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
                for answer in self._asked.values():
                    if not answer.done():
                        answer.set_exception(Unavailable("the replica's feed broke"))
                self._on_lost()
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(MAX_REDIAL_S, self._delay_s * 2)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        expected: int | None = None
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = _from_replica.decode(await _read(reader, MAX_FRAME_BYTES))
            if isinstance(message, Answer):
                if (answer := self._asked.get(message.number)) is not None and not answer.done():
                    answer.set_result(message.body)
                continue
            if isinstance(message, Update) and message.seq != expected:
                raise ConnectionError(f"feed update {message.seq} came where {expected} was due")
            expected = message.seq + 1
            self._delay_s = MIN_REDIAL_S
            self._on_message(message)
