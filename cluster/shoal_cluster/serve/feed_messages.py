"""The messages between replicas and gateways on the feed, in frames."""

from __future__ import annotations

import asyncio
import math

import msgspec

from shoal_cluster.policies.route_query import PRICED_STEPS
from shoal_cluster.policies.wishes import Wish
from shoal_replica.frames import FrameReader
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request, TokenDelta
from shoal_replica.stats import ReplicaStats

# What a gateway may ask for: a BlockMap; PastSamples; metric points; that the replica drains and is replaced; that it
# has these adapters.
BLOCKS, PAST, METRICS, DRAIN, ADAPTERS = "blocks", "past", "metrics", "drain", "adapters"
SILENCE_S = 5.0
MAX_FRAME_BYTES = 256 * 2**20  # a snapshot of millions of blocks
MAX_REQUEST_BYTES = 64 * 2**10  # a longer request travels by Serve's call alone
MAX_GATEWAY_FRAME_BYTES = 32 * 2**20  # some thousand adapters with their sources


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """A gateway's first frame."""

    gateway_id: str


class BlockSource(msgspec.Struct, frozen=True, array_like=True):
    """Where another replica gives its cached blocks, and how many leading blocks of the prompt it should have."""

    host: str
    port: int
    num_blocks: int


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request whose turn has come; its ``due_s`` counts from its arrival here. Serve's call with the same may follow.
    ``source`` has more of its blocks.
    """

    request: Request
    source: BlockSource | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """A gateway wants no more of one sequence (its text has reached a stop string), or of a request."""

    request_id: str
    index: int | None = None


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """A gateway wants a request back to place it elsewhere. One that has started stays, unless it is ``also_started``
    ones that are wanted; a beam search stays.
    """

    request_id: str
    also_started: bool = False


class Promise(msgspec.Struct, frozen=True, tag="promise"):
    """A gateway is about to send a request, which will take ``num_blocks`` free blocks and make the replica compute
    ``num_tokens`` prompt tokens. It stands until the request comes, or a ``Withdraw``.
    """

    request_id: str
    num_blocks: int
    num_tokens: int


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """The promised request does not come."""

    request_id: str


class ToldWish(msgspec.Struct, frozen=True, array_like=True):
    """A Wish as it is sent: a request that a gateway holds and plans to send to this replica. Hosts' clocks differ, so
    times count from when it is told: its first token is due in ``due_in_s``, and it arrived ``age_s`` before.
    """

    priority: int
    place: int
    due_in_s: float
    num_blocks: int
    num_tokens: int
    num_cached_blocks: int = 0
    decode_steps: int = PRICED_STEPS
    age_s: float = 0.0
    length_s: float = math.inf
    is_over: bool = False

    @classmethod
    def at(cls, wish: Wish, now: float) -> ToldWish:
        priority, place, due_s = wish.rank
        return cls(
            priority=priority,
            place=place,
            due_in_s=due_s - now,
            num_blocks=wish.num_blocks,
            num_tokens=wish.num_tokens,
            num_cached_blocks=wish.num_cached_blocks,
            decode_steps=wish.decode_steps,
            age_s=now - wish.arrival_s,
            length_s=wish.length_s,
            is_over=wish.is_over,
        )

    def wish(self, now: float) -> Wish:
        return Wish(
            rank=(self.priority, self.place, now + self.due_in_s),
            num_blocks=self.num_blocks,
            num_tokens=self.num_tokens,
            num_cached_blocks=self.num_cached_blocks,
            decode_steps=self.decode_steps,
            arrival_s=now - self.age_s,
            length_s=self.length_s,
            is_over=self.is_over,
        )


class Wishes(msgspec.Struct, frozen=True, tag="wishes"):
    """All requests that a gateway holds and plans to send to this replica when their turn comes."""

    wishes: tuple[ToldWish, ...]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A gateway asks for something that updates do not carry. Questions are the keys of ``FeedServer``'s answers."""

    number: int
    question: str
    body: bytes = b""


class Promised(msgspec.Struct, frozen=True, array_like=True):
    """Sums over promises: requests, blocks, prompt tokens."""

    num_requests: int = 0
    num_blocks: int = 0
    num_tokens: int = 0


class InFlight(msgspec.Struct, frozen=True, array_like=True):
    """Another gateway's prompt that waits at the replica or is being computed, and those of its blocks that were not
    cached when it came, but soon will be.
    """

    request_id: str
    block_hashes: tuple[BlockHash, ...]


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The whole ledger: the stats and every cached block, with the other gateways' promises, wishes and prompts in
    flight. The next update has number ``seq + 1``.
    """

    seq: int
    stats: ReplicaStats
    hashes: tuple[BlockHash, ...]
    promised: Promised = Promised()
    wishes: tuple[ToldWish, ...] | None = ()
    in_flight: tuple[InFlight, ...] = ()


class Update(msgspec.Struct, frozen=True, tag="update", omit_defaults=True):
    """One step, or what else has changed: blocks stored and removed, the stats after it, and the gateway's own tokens
    and newly accepted requests. Of the other gateways: their promises and wishes, their prompts that have come
    (``in_flight``), and the ids of those that have ``landed``: computed, or given up.

    ``stats`` and ``wishes`` are None when they have not changed: the last ones are still true.
    """

    seq: int
    stats: ReplicaStats | None = None
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    deltas: tuple[TokenDelta, ...] = ()
    accepted: tuple[str, ...] = ()
    promised: Promised = Promised()
    wishes: tuple[ToldWish, ...] | None = None
    in_flight: tuple[InFlight, ...] = ()
    landed: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A submitted request that no Serve call has come for does not run here, or no longer. The gateway places it
    elsewhere, to go on after the tokens it has, unless the request itself is invalid, in ``field``. ``is_full``: for
    want of room; ``is_failed``: by an error at the replica; else it leaves or has handed the request back. Not part of
    the updates' numbering.
    """

    request_id: str
    reason: str
    field: str = ""
    is_full: bool = False
    is_failed: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To the question of that number; empty if the replica does not know it. Not part of the updates' numbering."""

    number: int
    body: bytes


FromGateway = Subscribe | Submit | Abort | Recall | Promise | Withdraw | Wishes | Ask
FromReplica = Snapshot | Update | Refused | Answer

_from_gateway = msgspec.msgpack.Decoder(FromGateway)
_from_replica = msgspec.msgpack.Decoder(FromReplica)


def put(transport: asyncio.Transport, data: bytes) -> bool:
    """Write to a connection, unless it is closed: its protocol hears of that a moment later, and until then uvloop's
    transports raise. Returns whether it was open.
    """
    if transport.is_closing():
        return False
    transport.write(data)
    return True


def frames_from_gateway() -> FrameReader[FromGateway]:
    """The reader of a gateway's connection."""
    return FrameReader(_from_gateway, MAX_GATEWAY_FRAME_BYTES)


def frames_from_replica() -> FrameReader[FromReplica]:
    """The reader of a replica's connection."""
    return FrameReader(_from_replica, MAX_FRAME_BYTES)
