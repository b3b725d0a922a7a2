"""What lies below the routes: request ids, the limit on bodies, event streams, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_cluster.serve.http.encoding import event
from shoal_cluster.serve.http.errors import error_response, is_anthropic, logged_report
from shoal_cluster.serve.request_id import check_request_id, new_request_id
from shoal_replica.errors import ShoalError

T = TypeVar("T")

DRAIN_FACTOR = 8  # how far past the limit a body is still read, so that its sender gets to see the refusal


class RequestFrame:
    """ASGI middleware: gives each request an id, returns it in ``x-request-id``, and limits the request's body.

    A client may send its own id in the same header. The id is at ``request.state.request_id``; a route may change it.

    Args:
        refuse: called with path and new id of each request whose own id is refused, and the type of its error.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, refuse: Callable[[str, str, str], None]) -> None:
        self._app = app
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or new_request_id()
        refusal: Response | None = None
        try:
            check_request_id(request_id)
        except ShoalError as error:
            request_id = new_request_id()
            refusal = error_response(error, request_id, scope["path"])
            self._refuse(scope["path"], request_id, type(error).__name__)
        scope.setdefault("state", {})["request_id"] = request_id
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self._max_body_bytes:
                return message
            while message.get("more_body") and num_bytes < DRAIN_FACTOR * self._max_body_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
            raise HTTPException(413, f"body: must be at most {self._max_body_bytes} bytes")

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = scope["state"]["request_id"]
                if is_anthropic(scope["path"]):
                    headers["request-id"] = scope["state"]["request_id"]
            await send(message)

        await (refusal or self._app)(scope, limited_receive, named_send)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If the client disconnects first, ``work`` is cancelled, and has ended when this raises.

    Uses plain tasks rather than a cancel scope, which would also cancel every await of the clean-up.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. An error before the first event becomes a plain error response, a later one the last event.

    The events' generator is closed as soon as the client disconnects.

    Args:
        in_its_words: an error with the field that the request's body has for it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request_id: str,
        in_its_words: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._request_id = request_id
        self._in_its_words = in_its_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_events(scope, receive, send))
        except ClientDisconnect:
            return

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            while True:
                error = None
                try:
                    data = await anext(events, None)
                except Exception as caught:
                    error, data = self._in_its_words(caught), None
                if error is not None and not started:
                    await error_response(error, self._request_id, scope["path"])(scope, receive, send)
                    return
                if error is not None:
                    data = event(logged_report(error, self._request_id).openai_body())
                if not started:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    started = True
                more = data is not None and error is None
                await send({"type": "http.response.body", "body": data or b"", "more_body": more})
                if not more:
                    return


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
