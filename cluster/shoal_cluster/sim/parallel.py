"""A run in two processes, replicas in one and gateways in the other, synchronised by windows of simulated time.

A message from a gateway reaches a replica at once; one from a replica reaches the gateways ``feed_delay_s`` later. With
windows of half that delay, what replicas do in one window affects the gateways no sooner than two windows later, so
both sides can compute at the same time. This is conservative parallel simulation (Fujimoto, "Parallel discrete event
simulation", 1990): events come in the same order as in one process, and the report is the same.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import sys
import traceback
from collections import deque
from functools import partial

import msgspec

from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.channel import Channel, num_cores
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.replica import EndedReplica, FeedMessage, Order, SimReplica
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.prefix_cache import BlockHash

MIN_REPLICAS, MIN_DELAY_S = 256, 0.002
"""With fewer replicas or a shorter feed delay, exchanging messages costs more than simulating a window."""

WINDOWS = 2
"""Windows per feed delay: more of them would let the sides drift further apart, but each costs a message."""

ROUNDING = 1.001
"""Windows are shortened by this factor, so that rounding of times never delivers a message a window too early."""

GRACE_S = 5.0

Sent = tuple[float, int, Order]
"""When a request was sent, the number of its replica, and the request."""


class Orders(msgspec.Struct, tag="orders"):
    """A window is over; this is what the gateways have sent since the last message."""

    orders: list[Sent]


class HandBack(msgspec.Struct, tag="ask"):
    """At ``time_s``, replica ``number`` is asked to hand a request back. ``orders``: what was sent before that."""

    orders: list[Sent]
    time_s: float
    number: int
    request_id: str


class Stop(msgspec.Struct, tag="stop"):
    """The run is over."""


class News(msgspec.Struct, tag="news"):
    """The feed messages of a window: when each was sent, and the number of its replica."""

    news: list[tuple[float, int, FeedMessage]]


class HandedBack(msgspec.Struct, tag="answer"):
    """The answer to ``HandBack``: whether the replica has handed the request back."""

    is_given: bool


class Ended(msgspec.Struct, tag="ended"):
    """Answers ``Stop``: the replicas at the end of the run."""

    replicas: list[EndedReplica]


class Failed(msgspec.Struct, tag="failed"):
    """The replicas' process has failed; ``why`` is its traceback."""

    why: str


def can_part(cluster: SimCluster) -> bool:
    """Whether the run is large enough to be faster in two processes, and gateways and replicas exchange nothing but
    requests and feed messages.
    """
    config = cluster.config
    return (
        len(cluster.replicas) >= MIN_REPLICAS
        and config.feed_delay_s >= MIN_DELAY_S
        and config.num_gateways == 1
        and config.hold is not None  # replicas get only what they have slots for,
        and config.scheduler.max_num_seqs <= config.scheduler.max_num_waiting  # so they never refuse
        and config.scaling is None
        and not (config.faults or config.has_shared_pool)
        and sys.platform == "linux"  # elsewhere a forked child may not be able to continue
        and num_cores() > 1
    )


def run_beside(cluster: SimCluster) -> None:
    """Run all scheduled arrivals to their end, with the replicas in a process of their own. Afterwards the cluster has
    no replicas any more; ``ended`` reports on them.

    Raises:
        RuntimeError: that process has failed.
    """
    here, there = socket.socketpair()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_step_replicas, args=(cluster, there, here), daemon=True)
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # a Ctrl-C must not interrupt the fork
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        fleet = _Fleet(Channel(here, News | HandedBack | Ended | Failed))
        try:
            cluster.ended_beside = _serve_gateways(cluster, fleet)
        except (EOFError, ConnectionError) as gone:
            raise RuntimeError(f"the process of the replicas has failed: {fleet.last_words()}") from gone
    finally:
        here.close()
        there.close()
        if process.pid is not None:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


class _Fleet:
    """The replicas in the other process. ``orders`` are requests that have not been passed on yet."""

    def __init__(self, channel: Channel[News | HandedBack | Ended | Failed]) -> None:
        self.orders: list[Sent] = []
        self._channel = channel
        self._news: deque[News] = deque()  # received while waiting for a HandedBack

    def end_window(self) -> None:
        self._channel.send(Orders(self.orders))
        self.orders.clear()

    def ask(self, time_s: float, number: int, request_id: str) -> bool:
        """Ask replica ``number`` to hand a request back; return whether it has."""
        self._channel.send(HandBack(self.orders, time_s, number, request_id))
        self.orders.clear()
        while not isinstance(message := self._receive(), HandedBack):
            assert isinstance(message, News)
            self._news.append(message)
        return message.is_given

    def news(self) -> News:
        """The feed messages of the next window."""
        message = self._news.popleft() if self._news else self._receive()
        assert isinstance(message, News)
        return message

    def stop(self) -> list[EndedReplica]:
        self._channel.send(Stop())
        while not isinstance(message := self._receive(), Ended):
            pass
        return message.replicas

    def last_words(self) -> str:
        """Why a process that is gone has failed, if it said so."""
        with contextlib.suppress(EOFError, ConnectionError, RuntimeError):
            while True:
                message = self._channel.receive()
                if isinstance(message, Failed):
                    return message.why
        return "it ended without a word; there may have been no memory left for it"

    def _receive(self) -> News | HandedBack | Ended:
        message = self._channel.receive()
        if isinstance(message, Failed):
            raise RuntimeError(f"the process of the replicas has failed: {message.why}")
        return message


class _Remote:
    """Stands for a replica in the other process; implements ``Target``."""

    draining = False

    def __init__(self, number: int, loop: EventLoop, fleet: _Fleet) -> None:
        self._number = number
        self._loop = loop
        self._fleet = fleet

    def place(self, order: Order, request: SimRequest, block_hashes: tuple[BlockHash, ...]) -> None:
        self._fleet.orders.append((self._loop.now, self._number, order))

    def hand_back(self, request_id: str) -> bool:
        return self._fleet.ask(self._loop.now, self._number, request_id)

    def wish(self, gateway_id: str, wishes: tuple[Wish, ...]) -> None:
        """There are no other gateways to tell."""


def _window_s(cluster: SimCluster) -> float:
    return cluster.config.feed_delay_s / WINDOWS / ROUNDING


def _serve_gateways(cluster: SimCluster, fleet: _Fleet) -> list[EndedReplica]:
    loop, delay_s = cluster.loop, cluster.config.feed_delay_s
    replica_ids, window_s = list(cluster.replicas), _window_s(cluster)
    cluster.replicas.clear()
    for gateway in cluster.gateways:
        gateway.targets = {name: _Remote(number, loop, fleet) for number, name in enumerate(replica_ids)}
    window, num_left = 0, 2 * WINDOWS + 1  # windows to run after the last token, until all feed messages have arrived
    while num_left:
        if window >= WINDOWS:
            for told_s, number, message in fleet.news().news:
                loop.at(told_s + delay_s, partial(cluster.hear, replica_ids[number], message))
        window += 1
        loop.run_until(window * window_s)
        fleet.end_window()
        num_left -= not cluster.book.num_open
    return fleet.stop()


# In the other process


def _step_replicas(cluster: SimCluster, there: socket.socket, here: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its end
    here.close()
    channel: Channel[Orders | HandBack | Stop] = Channel(there, Orders | HandBack | Stop)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _obey(cluster, channel)
        except (EOFError, ConnectionError):
            pass
        except Exception:
            channel.send(Failed(traceback.format_exc()))


def _obey(cluster: SimCluster, channel: Channel[Orders | HandBack | Stop]) -> None:
    loop, requests, block_size = cluster.loop, cluster.book.requests, cluster.config.cache.block_size
    replicas = list(cluster.replicas.values())
    news: list[tuple[float, int, FeedMessage]] = []

    def publish(number: int, replica: SimReplica, message: FeedMessage) -> None:
        news.append((loop.now, number, message))

    for number, replica in enumerate(replicas):
        replica.publish = partial(publish, number)
    loop.stop()  # the events scheduled so far belong to the gateways
    cluster.start_beats()
    window, window_s = 0, _window_s(cluster)
    while not isinstance(message := channel.receive(), Stop):
        for sent_s, number, order in message.orders:
            loop.run_until(sent_s)
            request = requests[order.request_id]
            replicas[number].place(order, request, request.block_hashes(block_size))
        if isinstance(message, HandBack):
            loop.run_until(message.time_s)
            channel.send(HandedBack(replicas[message.number].hand_back(message.request_id)))
            continue
        window += 1
        loop.run_until(window * window_s)
        channel.send(News(news))
        news.clear()
    channel.send(Ended([replica.ended() for replica in replicas]))
