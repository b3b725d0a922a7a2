"""How a body's calls become an answer: one JSON object, or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import Json


class AskingBody(Protocol):
    """The request body of a route that generates."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool | None: ...

    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """The calls that it asks for. Raises InvalidArgument."""
        ...

    def in_its_words(self, error: Exception) -> Exception:
        """``error`` with the field that the body has for it."""
        ...


B = TypeVar("B", bound=AskingBody, contravariant=True)


class Answers(Protocol[B]):
    """Runs the calls of a body, and answers with one JSON object or with server-sent events."""

    def whole(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: B, request_id: str, model: str
    ) -> Coroutine[Any, Any, Json]: ...

    def events(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: B, request_id: str, model: str
    ) -> AsyncGenerator[bytes, None]: ...


class Growing(Protocol):
    """One answer as it comes into being."""

    def body(self) -> Json:
        """The whole so far."""
        ...

    def begin(self, first: Chunk) -> bytes:
        """The events before those of the first chunk."""
        ...

    def take(self, chunk: Chunk) -> bytes:
        """The events that a chunk brings."""
        ...

    def end(self) -> bytes:
        """The last events."""
        ...

    def fail(self, error: Exception) -> bytes:
        """The last events of a stream that has begun, and failed."""
        ...


class GrowingAnswers(Generic[B]):
    """Answers that are told as one object, or as the events by which it grows.

    Args:
        new: an empty answer to a body, given the request id, the model's name and whether anybody reads the events.
    """

    def __init__(self, new: Callable[[GatewayCore, B, str, str, bool], Growing]) -> None:
        self._new = new

    async def whole(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: B, request_id: str, model: str
    ) -> Json:
        """Run the call to its end and return the answer."""
        answer = self._new(core, body, request_id, model, False)
        async with open_merged_chunks(core, calls) as chunks:
            async for _, chunk in chunks:
                answer.take(chunk)
        return answer.body()

    async def events(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: B, request_id: str, model: str
    ) -> AsyncGenerator[bytes, None]:
        """Run the call; yields server-sent events as chunks come. Closing the generator cancels it."""
        answer = self._new(core, body, request_id, model, True)
        has_begun = False  # no sooner than with the first chunk, so that an error before it has a status of its own
        try:
            async with open_merged_chunks(core, calls) as chunks:
                async for _, chunk in chunks:
                    events = b"" if has_begun else answer.begin(chunk)
                    if events := events + answer.take(chunk):
                        has_begun = True
                        yield events
        except Exception as error:
            if not has_begun:
                raise
            yield answer.fail(body.in_its_words(error))
            return
        yield answer.end()
