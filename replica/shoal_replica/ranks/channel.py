"""The TCP connection between a replica's engine and one of its ranks: typed messages in frames.

A rank must know the replica's key.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic

import msgspec

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import EngineConfig
from shoal_replica.executor import BlockPart, SchedulerOutput, StepResult
from shoal_replica.frames import FrameReader, frame

MAX_FRAME_BYTES = 256 * 2**20
MAX_HELLO_BYTES = 2**12
READ_BYTES = 2**16


class RankAddress(msgspec.Struct, frozen=True):
    """What a new rank is told: where the engine listens, the key, the rank's number, and its own host's address."""

    host: str
    port: int
    key: str
    rank: int
    rank_host: str


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The whole configuration, the address of the store by which ranks meet (kept by rank 0), and every rank's host."""

    config: EngineConfig
    store_host: str
    store_port: int
    hosts: tuple[str, ...]


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One step, and the tokens, as (sequence, token), that the step before it sampled."""

    output: SchedulerOutput
    sampled: tuple[tuple[int, int], ...]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load this rank's shard of an adapter. It answers ``Ready`` or ``Refused``."""

    adapter: AdapterConfig


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Free an adapter, which no sequence uses. It answers ``Ready``."""

    name: str


class ReadBlocks(msgspec.Struct, frozen=True, tag="read_blocks"):
    """Tell what this rank holds of some blocks. It answers ``Blocks`` or ``Refused``."""

    block_ids: tuple[int, ...]


class WriteBlocks(msgspec.Struct, frozen=True, tag="write_blocks"):
    """Fill this rank's part of blocks. It answers ``Ready`` or ``Refused``."""

    block_ids: tuple[int, ...]
    part: BlockPart


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """No more steps follow."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's first frame. ``store_port``: a port on its host where it can serve the store."""

    rank: int
    key: str
    pid: int
    host: str
    store_port: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and warmed up, or what was asked for since is done."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The adapter cannot be loaded, or the blocks not be read or filled."""

    message: str


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """What the rank holds of the blocks that it was asked for."""

    part: BlockPart


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """A heartbeat: the rank's process is alive, and this is how far its model has got.

    Attributes:
        step, num_collectives: begun so far; of ranks that wait for each other, the one that is behind has fewer.
        work: changes as the step progresses.
        awaited_rank: the rank of another stage that it waits for.
    """

    step: int = 0
    num_collectives: int = 0
    work: int = 0
    is_busy: bool = False
    awaited_rank: int | None = None

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.step, self.num_collectives, self.work


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The step's tokens, from the rank that samples."""

    step: int
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends. ``is_secondary``: because another rank did not answer. ``kind``: a ShoalError's name, or ""."""

    kind: str
    message: str
    is_secondary: bool


ToRank = Setup | Step | Load | Unload | ReadBlocks | WriteBlocks | Stop
FromRank = Hello | Ready | Refused | Blocks | Pulse | Done | Failed

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class EngineLink:
    """A rank's end of the channel. Any thread may call ``send``, but only one ``receive``."""

    def __init__(self, address: RankAddress, timeout_s: float) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._reader = FrameReader(_to_rank, MAX_FRAME_BYTES)
        self._pending: deque[ToRank] = deque()
        self._lock = threading.Lock()

    def send(self, message: FromRank) -> None:
        data = frame(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> ToRank:
        """The next message, without a timeout: if the engine is gone, the socket is closed.

        Raises:
            ConnectionError: the engine is gone.
        """
        while not self._pending:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the engine has closed the channel")
            self._pending.extend(self._reader.take(data))
        return self._pending.popleft()

    def close(self) -> None:
        self._socket.close()


class RankLink:
    """The engine's end of the channel to one rank, with what was last heard from it.

    Args:
        timeout_s: longest wait for the rank to read what is sent.
        hello_s: the longest wait for its first frame.

    Raises:
        OSError, ValueError: the peer is not a rank.

    Attributes:
        hello: the rank's first frame. The caller must check its key.
        heard_s: when data last arrived, by ``time.monotonic``.
        pulse: the last pulse.
        progressed_s: when the rank's progress was last seen to change.
    """

    def __init__(self, connection: socket.socket, timeout_s: float, hello_s: float) -> None:
        self.heard_s = self.progressed_s = monotonic()
        deadline = self.heard_s + hello_s
        self.pulse = Pulse()
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(_from_rank, MAX_HELLO_BYTES)
        messages: list[FromRank] = []
        while not messages:  # until the frame is complete: whoever it is may send a byte now and then
            if (left_s := deadline - monotonic()) <= 0:
                raise TimeoutError("it does not say who it is")
            self._socket.settimeout(left_s)
            messages = self.read()
        self._socket.settimeout(timeout_s)
        self._reader.max_bytes = MAX_FRAME_BYTES
        if not isinstance(messages[0], Hello):
            raise ValueError("no rank's first frame")
        self.hello = messages[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send frames made by ``frame``. Raises OSError if the rank is gone or does not read."""
        self._socket.sendall(data)

    def read(self) -> list[FromRank]:
        """The messages that have arrived; call it when the socket is readable. Pulses are recorded, not returned.

        Raises:
            ConnectionError: the rank is gone.
        """
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("closed")
        self.heard_s = monotonic()
        messages: list[FromRank] = []
        for message in self._reader.take(data):
            if isinstance(message, Pulse):
                self._note(message)
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()

    def _note(self, pulse: Pulse) -> None:
        if pulse.progress != self.pulse.progress:
            self.progressed_s = self.heard_s
        self.pulse = pulse


def readable(links: Sequence[RankLink], timeout_s: float) -> list[RankLink]:
    """Those with something to read, or whose end has gone, after at most ``timeout_s``."""
    poll, by_number = select.poll(), {link.fileno(): link for link in links}  # select() takes no numbers above 1 023
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(math.ceil(timeout_s * 1000))]
