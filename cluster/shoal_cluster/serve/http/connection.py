"""HTTP connections that end if a client sends a request's head without end, or stops in the midst of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
"""Of a head, or of what follows a body, so much is read before it must be complete, and at most one read of the socket
more.
"""

PATIENCE_S = 60.0
"""A connection has a first request's head this long after it was made, later heads this long after their first byte,
and each further piece of a body after the one before.
"""


class PatientProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol, which has no such limits: without them anybody may fill the gateway's memory, and clients
    that are gone keep their connections. No key has been looked at by then.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._num_bytes = 0  # since something was complete
        self._is_amid = True  # a request
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(PATIENCE_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._calm()
        elif self._num_bytes > MAX_HEAD_BYTES:
            if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
                self.transport.abort()  # a refusal would become part of the answer to the request before
            else:
                self.send_400_response(f"the head of a request must have at most {MAX_HEAD_BYTES} bytes")
            self._calm()
        elif self._patience is None and (self._is_amid or self.cycle is None or self.cycle.response_complete):
            # In the last case there were empty lines between requests, and uvicorn has stopped its own clock.
            self._patience = self.loop.call_later(PATIENCE_S, self._give_up)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_amid = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._note_progress()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._note_progress()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._note_progress()
        self._is_amid = False

    def _note_progress(self) -> None:
        self._num_bytes = 0
        self._calm()

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.flow.read_paused:  # it is not the client that makes it wait, but an answer before this one
            self._patience = self.loop.call_later(PATIENCE_S, self._give_up)
        else:
            self.transport.abort()
