"""The feed: one socket from a replica to each gateway, written once per engine step.

A replica sends a ``Snapshot`` when a gateway connects, then ``Update``s numbered without a gap. A gateway that sees a
gap, or hears nothing for ``SILENCE_S``, reconnects. Gateways submit their requests on it.

The replica passes on to each gateway the others' promises (room for requests that are on their way) and wishes
(requests that they hold and plan to send here), so that they do not all send their next request to the same replica,
and the most urgent goes first. It also tells them of each other's prompts that are not computed yet, so that prompts
with the same beginning follow those.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from shoal_cluster.serve import feed_messages
from shoal_cluster.serve.feed_messages import (
    Abort,
    Answer,
    Ask,
    BlockSource,
    FromGateway,
    InFlight,
    Promise,
    Promised,
    Recall,
    Refused,
    Snapshot,
    Submit,
    Subscribe,
    ToldWish,
    Wishes,
    Withdraw,
    frames_from_gateway,
    put,
)
from shoal_cluster.serve.listening import stop_listening
from shoal_cluster.serve.subscriber import Subscriber
from shoal_replica.engine import Engine
from shoal_replica.frames import frame
from shoal_replica.reports import StepReport
from shoal_replica.request import Request, TokenDelta

MAX_BACKLOG_BYTES = 32 * 2**20
GATHER_S = 0.002  # how long promises are collected before the other gateways are told


class FeedServer:
    """The replica's end of its feeds. Requests belong to the gateway that sent them; when it is gone, they are aborted.

    ``answers`` maps each question that a gateway may ask to a function from its body to the answer's. ``on_submit``
    takes requests that arrive on the feed, with their gateway's id and where more of their blocks are.
    """

    def __init__(self, engine: Engine, answers: Mapping[str, Callable[[bytes], bytes]] | None = None) -> None:
        self._engine = engine
        self._answers = answers or {}
        self.on_submit: Callable[[Request, str, BlockSource | None], None] = lambda request, gateway_id, source: None
        self._subscribers: dict[str, Subscriber] = {}
        self._server: asyncio.Server | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._connections: set[_Connection] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._wishes_version = 0

    async def start(self, host: str) -> tuple[str, int]:
        """Listen on a free port of ``host``; returns the address."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, 0)
        self._unsubscribe = self._engine.subscribe(self._publish)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    def own(self, request: Request, gateway_id: str) -> bool:
        """Send a request's tokens to ``gateway_id``. False if that gateway is not connected."""
        subscriber = self._subscribers.get(gateway_id)
        if subscriber is None:
            return False
        request_id = request.request_id
        subscriber.request_ids.add(request_id)
        subscriber.accepted.append(request_id)
        if request.block_hashes:
            subscriber.in_flight[request_id] = request.block_hashes
            self._tell_others_of(subscriber, request_id)
        return True

    def disown(self, request_id: str, gateway_id: str) -> None:
        """Forget a request that has ended. Unknown ids are ignored."""
        if (subscriber := self._subscribers.get(gateway_id)) is not None:
            subscriber.request_ids.discard(request_id)
            subscriber.promises.pop(request_id, None)
            if self._land(subscriber, request_id):
                self._tell_others()

    def refuse(self, gateway_id: str, refused: Refused) -> None:
        """Tell a gateway at once that a request of its own does not run here, if the gateway is connected."""
        if (subscriber := self._subscribers.get(gateway_id)) is not None:
            put(subscriber.transport, frame(refused))

    async def stop(self) -> None:
        """Close every connection; what is still buffered is sent as far as the gateways read it."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._server is not None:
            await stop_listening(self._server)
        for connection in tuple(self._connections):
            connection.hang_up()
        if self._telling is not None:
            self._telling.cancel()

    # Called by connections

    def connected(self, connection: _Connection) -> None:
        """A connection was made."""
        self._connections.add(connection)
        if self._unsubscribe is None:  # it was being accepted when the server stopped
            connection.hang_up()

    def subscribe(self, gateway_id: str, transport: asyncio.Transport) -> Subscriber:
        """A gateway has identified itself. Its older connection, if there is one, is aborted."""
        if (older := self._subscribers.pop(gateway_id, None)) is not None:
            self._forget(older)
            older.transport.abort()
        hashes = self._engine.cache_hashes()
        subscriber = self._subscribers[gateway_id] = Subscriber(gateway_id, transport)
        promised, wishes = self._promised_by_others(subscriber), self._news_of_wishes(subscriber) or ()
        in_flight = [
            prompt
            for other in self._others(subscriber)
            for request_id in other.in_flight
            if (prompt := self._in_flight(other, request_id)).block_hashes
        ]
        snapshot = frame(Snapshot(0, self._engine.stats(), hashes, promised, wishes, tuple(in_flight)))
        subscriber.unread_bytes = len(snapshot)
        put(transport, snapshot)
        return subscriber

    def lost(self, connection: _Connection, subscriber: Subscriber | None) -> None:
        """The connection is over."""
        self._connections.discard(connection)
        if subscriber is not None and self._subscribers.get(subscriber.gateway_id) is subscriber:
            del self._subscribers[subscriber.gateway_id]
            self._forget(subscriber)

    def take(self, subscriber: Subscriber, message: FromGateway) -> None:
        """Handle a message of a gateway."""
        match message:
            case Submit() if self._subscribers.get(subscriber.gateway_id) is subscriber:  # else lost: it reconnected
                self.on_submit(message.request, subscriber.gateway_id, message.source)
            case Abort() if message.request_id in subscriber.request_ids:
                if message.index is None:  # its end is not told: the id may be that of another request by then
                    self.disown(message.request_id, subscriber.gateway_id)
                self._engine.abort(message.request_id, message.index)
            case Recall() if message.request_id in subscriber.request_ids:
                self._engine.hand_back(message.request_id, message.also_started)
            case Promise() if message.request_id not in subscriber.request_ids:  # else overtaken by the request
                subscriber.promises[message.request_id] = message
                self._tell_others()
            case Withdraw():
                if subscriber.promises.pop(message.request_id, None) is not None:
                    self._tell_others()
            case Wishes():
                now = time.monotonic()
                subscriber.wishes = tuple(told.wish(now) for told in message.wishes)
                self._wishes_version += 1
                self._tell_others()
            case Ask():
                answer = self._answers.get(message.question)
                body = b"" if answer is None else answer(message.body)
                put(subscriber.transport, frame(Answer(message.number, body)))

    def _forget(self, subscriber: Subscriber) -> None:
        for request_id in tuple(subscriber.request_ids):
            self._engine.abort(request_id)
        if subscriber.promises or subscriber.wishes or subscriber.in_flight:
            self._tell_soon()
        for request_id in tuple(subscriber.in_flight):
            self._land(subscriber, request_id)
        self._wishes_version += bool(subscriber.wishes)

    def _publish(self, report: StepReport) -> None:
        for subscriber in self._subscribers.values():
            for request_id in subscriber.accepted:
                subscriber.promises.pop(request_id, None)  # these stats are the first to count it
            if subscriber.in_flight:
                for delta in report.deltas:
                    self._land(subscriber, delta.request_id)
        for subscriber in tuple(self._subscribers.values()):
            if subscriber.is_behind(MAX_BACKLOG_BYTES):
                subscriber.transport.abort()  # it will reconnect and get a snapshot
                continue
            accepted, subscriber.accepted = tuple(subscriber.accepted), []
            deltas = tuple(sorted((d for d in report.deltas if d.request_id in subscriber.request_ids), key=_can_wait))
            promised, wishes = self._promised_by_others(subscriber), self._news_of_wishes(subscriber)
            subscriber.send(report, deltas, accepted, promised, wishes)

    def _tell_others(self) -> None:
        """A gateway's promises, wishes or prompts have changed: tell the others, if there are any."""
        if len(self._subscribers) > 1:
            self._tell_soon()

    def _tell_soon(self) -> None:
        """Send what is new in an update of its own after ``GATHER_S``, unless an engine report carries it before."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        for subscriber in tuple(self._subscribers.values()):
            stats, known = subscriber.told
            if stats is None:
                continue  # its first report is still to come
            promised, wishes = self._promised_by_others(subscriber), self._news_of_wishes(subscriber)
            if promised != known or wishes is not None or subscriber.has_prompts_to_hear_of:
                subscriber.send(StepReport((), (), (), stats), (), (), promised, wishes)

    def _promised_by_others(self, subscriber: Subscriber) -> Promised:
        if len(self._subscribers) == 1:
            return Promised()
        promises = [promise for other in self._others(subscriber) for promise in other.promises.values()]
        return Promised(len(promises), sum(p.num_blocks for p in promises), sum(p.num_tokens for p in promises))

    def _news_of_wishes(self, subscriber: Subscriber) -> tuple[ToldWish, ...] | None:
        """All wishes of the other gateways; None if ``subscriber`` knows them already."""
        if subscriber.told_wishes_version == self._wishes_version:
            return None
        subscriber.told_wishes_version = self._wishes_version
        now = time.monotonic()
        return tuple(ToldWish.at(wish, now) for other in self._others(subscriber) for wish in other.wishes)

    def _tell_others_of(self, subscriber: Subscriber, request_id: str) -> None:
        """Tell the other gateways of a prompt that has come and is not computed yet."""
        if not (others := self._others(subscriber)):
            return
        prompt = self._in_flight(subscriber, request_id)
        if not prompt.block_hashes:
            del subscriber.in_flight[request_id]
            return
        for other in others:
            other.note_launched(prompt)
        self._tell_others()

    def _land(self, subscriber: Subscriber, request_id: str) -> bool:
        """A prompt is computed, or will not be: note it for the other gateways, which hear of it together with the
        blocks that it stores. False if that is not new.
        """
        if subscriber.in_flight.pop(request_id, None) is None:
            return False
        for other in self._others(subscriber):
            other.note_landed(request_id)
        return True

    def _in_flight(self, subscriber: Subscriber, request_id: str) -> InFlight:
        return InFlight(request_id, self._engine.uncached(subscriber.in_flight[request_id]))

    def _others(self, subscriber: Subscriber) -> list[Subscriber]:
        return [other for other in self._subscribers.values() if other is not subscriber]


def _can_wait(delta: TokenDelta) -> bool:
    """Whether other deltas go first, since gateways write to one client after the other: it neither begins nor ends an
    answer. A report has one delta per sequence, so sorting never reorders those of the same sequence.
    """
    return delta.start is None and delta.finish_reason is None


class _Connection(asyncio.Protocol):
    """Handles a gateway's frames as they arrive, without a task switch for each: requests are among them."""

    def __init__(self, server: FeedServer) -> None:
        self._server = server
        self._frames = frames_from_gateway()
        self._subscriber: Subscriber | None = None
        self._transport: asyncio.Transport
        self._patience: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Drops a peer that acknowledges nothing, like a vanished host: its requests and promises must not outlive it.
        silence_ms = int(feed_messages.SILENCE_S * 1000)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
        self._patience = asyncio.get_running_loop().call_later(feed_messages.SILENCE_S, self.hang_up)
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.take(data):
                if self._subscriber is not None:
                    self._server.take(self._subscriber, message)
                elif isinstance(message, Subscribe):
                    self._patience.cancel()
                    self._subscriber = self._server.subscribe(message.gateway_id, self._transport)
                else:
                    raise ConnectionError("a gateway's first frame says who it is")
        except (ConnectionError, msgspec.DecodeError):
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        self._server.lost(self, self._subscriber)

    def hang_up(self) -> None:
        """Close the connection, once what is buffered has been sent."""
        self._transport.close()
        self.connection_lost(None)
