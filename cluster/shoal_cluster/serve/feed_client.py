"""The gateway's end of a feed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import msgspec

from shoal_cluster.serve import feed_messages
from shoal_cluster.serve.feed_messages import (
    MAX_REQUEST_BYTES,
    Abort,
    Answer,
    Ask,
    BlockSource,
    FromReplica,
    Promise,
    Recall,
    Refused,
    Snapshot,
    Submit,
    Subscribe,
    ToldWish,
    Update,
    Wishes,
    Withdraw,
    frames_from_replica,
    put,
)
from shoal_replica.errors import Unavailable
from shoal_replica.frames import LENGTH_BYTES, frame
from shoal_replica.request import Request

TOKEN_BYTES = 3  # of a token id in msgpack, for most of a large vocabulary; others take 1, 2 or 5
HASH_BYTES = 18
MIN_REDIAL_S, MAX_REDIAL_S = 0.02, 1.0

T = TypeVar("T")


class FeedClient:
    """Follows one replica's feed, reconnecting whenever it breaks, until closed.

    Args:
        on_message: called with every snapshot and update, in order, after the tasks that wait for its tokens have been
            woken.
        on_lost: called when the feed has broken, or could not be connected.
        on_tokens: called at once with an update that has tokens or newly accepted requests: clients wait for them.
        on_refused: called for a request that the replica does not run.
    """

    def __init__(
        self,
        gateway_id: str,
        address: tuple[str, int],
        on_message: Callable[[Snapshot | Update], None],
        on_lost: Callable[[], None],
        on_tokens: Callable[[Update], None] = lambda update: None,
        on_refused: Callable[[Refused], None] = lambda refused: None,
    ) -> None:
        self._gateway_id = gateway_id
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_tokens = on_tokens
        self._on_refused = on_refused
        self._connection: _Connection | None = None
        self._expected: int | None = None
        self._delay_s = MIN_REDIAL_S
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._num_asked = 0
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"shoal-feed-{address[1]}")

    @property
    def is_open(self) -> bool:
        """Whether the replica can be told anything now."""
        return self._connection is not None

    def submit(self, request: Request, source: BlockSource | None = None) -> bool:
        """Send a request, and where more of its blocks are. False if the feed is down or the request is too long."""
        if self._connection is None or _usual_bytes(request) > MAX_REQUEST_BYTES:
            return False
        data = frame(Submit(request, source))
        if len(data) > LENGTH_BYTES + MAX_REQUEST_BYTES:
            return False
        return put(self._connection.transport, data)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ask the replica to end one sequence, or a whole request. If the feed is down, the replica ends it anyway."""
        self._send(Abort(request_id, index))

    def recall(self, request_id: str, also_started: bool = False) -> None:
        """Ask for a request back; the replica keeps it if it has started, unless ``also_started``."""
        self._send(Recall(request_id, also_started))

    def promise(self, request_id: str, num_blocks: int, num_tokens: int) -> None:
        """Tell the replica, and through it the other gateways, what a request will take there."""
        self._send(Promise(request_id, num_blocks, num_tokens))

    def withdraw(self, request_id: str) -> None:
        """Take a promise back: the request does not come, or is over."""
        self._send(Withdraw(request_id))

    def wish(self, wishes: tuple[ToldWish, ...]) -> None:
        """Tell the replica, and through it the other gateways, everything that this gateway plans to send there."""
        self._send(Wishes(wishes))

    async def ask(self, question: str, timeout_s: float, body: bytes = b"") -> bytes:
        """The replica's answer to a question.

        Raises:
            Unavailable: the feed is down or breaks, or the replica does not know the question or answer in time.
        """
        if self._connection is None:
            raise Unavailable("the replica's feed is not connected")
        self._num_asked += 1
        number = self._num_asked
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, question, body))
            async with asyncio.timeout(timeout_s):
                told: bytes = await answer
        except TimeoutError:
            raise Unavailable(f"the replica did not answer within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)
        if not told:
            raise Unavailable(f"the replica cannot answer {question!r}")
        return told

    def check_health(self) -> None:
        """Raise RuntimeError if the feed is no longer followed, which only a bug can cause."""
        if self._task.done():
            raise RuntimeError(f"the feed of {self._address} is no longer followed: {self._task}")

    def close(self) -> Awaitable[object]:
        """Stop following. Await the result to wait for the end of the task."""
        self._task.cancel()
        return asyncio.gather(self._task, return_exceptions=True)

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            put(self._connection.transport, frame(message))

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(feed_messages.SILENCE_S):
                    _, connection = await loop.create_connection(lambda: _Connection(self._take), *self._address)
                self._expected = None
                self._connection = connection
                self._send(Subscribe(self._gateway_id))
                await connection.until_lost()
            except (OSError, TimeoutError, msgspec.DecodeError):
                pass  # reconnect; the view shows the replica as disconnected meanwhile
            finally:
                if self._connection is not None:
                    self._connection.transport.abort()
                    self._connection = None
                for answer in self._asked.values():
                    if not answer.done():
                        answer.set_exception(Unavailable("the replica's feed broke"))
                self._on_lost()
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(MAX_REDIAL_S, self._delay_s * 2)

    def _take(self, connection: _Connection, message: FromReplica) -> None:
        if isinstance(message, Answer):
            if (answer := self._asked.get(message.number)) is not None and not answer.done():
                answer.set_result(message.body)
            return
        if isinstance(message, Refused):
            self._on_refused(message)
            return
        if isinstance(message, Update) and message.seq != self._expected:
            raise ConnectionError(f"feed update {message.seq} came where {self._expected} was due")
        self._expected = message.seq + 1
        self._delay_s = MIN_REDIAL_S
        if isinstance(message, Update) and (message.deltas or message.accepted):
            self._on_tokens(message)
        asyncio.get_running_loop().call_soon(connection.guard, self._on_message, message)


def _usual_bytes(request: Request) -> int:
    """Estimates the size of a request's token ids and hashes: encoding a long request takes milliseconds."""
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    return TOKEN_BYTES * num_tokens + HASH_BYTES * len(request.block_hashes)


class _Connection(asyncio.Protocol):
    """Delivers messages as they arrive, without a task switch for each: there are tens of thousands a second."""

    def __init__(self, take: Callable[[_Connection, FromReplica], None]) -> None:
        loop = asyncio.get_running_loop()
        self._take = take
        self._frames = frames_from_replica()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._lost.add_done_callback(lambda lost: lost.exception())  # retrieved: nobody awaits a closed client's
        self._heard_s = loop.time()
        self._clock = loop.time
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._lost.done():
            return
        self._heard_s = self._clock()
        self.guard(self._take_all, data)

    def _take_all(self, data: bytes) -> None:
        for message in self._frames.take(data):
            self._take(self, message)

    def guard(self, take: Callable[[T], None], what: T) -> None:
        """Call ``take``. An error in it ends the connection, and ``until_lost`` raises it."""
        try:
            take(what)
        except Exception as error:
            if not self._lost.done():
                self._lost.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_exception(exc or ConnectionResetError("the feed was closed"))

    async def until_lost(self) -> None:
        """Wait and raise what ended the connection; TimeoutError after ``SILENCE_S`` without any data."""
        while True:
            silence_s = feed_messages.SILENCE_S
            await asyncio.wait([self._lost], timeout=max(0.0, self._heard_s + silence_s - self._clock()))
            if self._lost.done():
                return self._lost.result()
            if self._clock() - self._heard_s >= silence_s:
                raise TimeoutError(f"nothing came for {silence_s:g} s")
