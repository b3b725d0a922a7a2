"""The clients of ``shoal bench gateway``, in a process of their own, so that only the gateway is measured."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.queues import Queue
from typing import Literal, cast

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.serve.call import GenerateCall
from shoal_replica.sampling_params import SamplingParams

Face = Literal["grpc", "http"]
PROMPT = (1, 2, 3)
EVENT_END = b"\n\n"


def read_streams(face: Face, port: int, num_streams: int, num_tokens: int, results: Queue[tuple[int, int]]) -> None:
    """Open all streams, read each to its end, and report the number of tokens and of messages."""
    read = _read_grpc if face == "grpc" else _read_http
    results.put(asyncio.run(read(port, num_streams, num_tokens)))


def stream_id(number: int) -> str:
    """The request id of stream ``number``."""
    return f"stream-{number}"


async def _read_grpc(port: int, num_streams: int, num_tokens: int) -> tuple[int, int]:
    """Read all streams over one channel."""
    async with GatewayClient(f"127.0.0.1:{port}") as client:

        async def read(number: int) -> list[int]:
            call = GenerateCall(
                request_id=stream_id(number),
                token_ids=PROMPT,
                sampling_params=SamplingParams(max_tokens=num_tokens, temperature=0.0),
            )
            return [len(chunk.token_ids) async for chunk in client.generate(call)]

        sizes = await asyncio.gather(*(read(number) for number in range(num_streams)))
    return sum(map(sum, sizes)), sum(map(len, sizes))


async def _read_http(port: int, num_streams: int, num_tokens: int) -> tuple[int, int]:
    """Read each stream on its own connection. Events are counted, not parsed, but for the last but one: the usage."""
    loop = asyncio.get_running_loop()
    streams = [EventCounter(stream_id(number), num_tokens) for number in range(num_streams)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(stream.ended for stream in streams))
    return sum(stream.num_tokens for stream in streams), sum(stream.num_events for stream in streams)


class EventCounter(asyncio.Protocol):
    """Reads one streamed completion as cheaply as possible."""

    def __init__(self, request_id: str, max_tokens: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        sent = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {request_id}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
        ).encode() + sent
        self._tail = b""
        self.num_events = -2  # the usage and the end marker do not count
        self.num_tokens = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += (self._tail[-1:] + data).count(EVENT_END) - self._tail[-1:].count(EVENT_END)
        self._tail = (self._tail + data)[-1024:]

    def connection_lost(self, exc: Exception | None) -> None:
        _, found, usage = self._tail.rpartition(b'"completion_tokens":')
        if exc is not None or not found:
            self.ended.set_exception(exc or ConnectionResetError(f"a stream ended with {self._tail[-200:]!r}"))
            return
        self.num_tokens = int(usage.split(b",", 1)[0])
        self.ended.set_result(None)
