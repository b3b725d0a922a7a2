"""A run in two processes: replicas in one, gateways in the other, in step by windows of simulated time.

What a gateway sends reaches a replica at once; what a replica tells reaches the gateways ``feed_delay_s`` later. So
what replicas do in one window of half that delay changes nothing for the gateways before the window after the next, and
each side can go on while the other computes. This is parallel simulation by conservative windows (Fujimoto, "Parallel
discrete event simulation", 1990): events come in the same order as in one process, and the report is the same.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import traceback
from functools import partial
from typing import TypeVar

import msgspec

from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.channel import Channel
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.replica import EndedReplica, FeedMessage, Order, SimReplica
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.prefix_cache import BlockHash

MIN_REPLICAS = 256
"""With fewer, a window takes as long as what happens in it."""

WINDOWS = 2
"""In a feed delay: with more of them either side may fall further behind the other, but each costs a message."""

ROUNDING = 1.001
"""Windows are so much shorter than that: what is told in one arrives in none too early, however dates are rounded."""

GRACE_S = 5.0

Message = TypeVar("Message")


class Orders(msgspec.Struct, tag="orders"):
    """What gateways have sent in a window: when, and to the replica of which number."""

    orders: list[tuple[float, int, Order]]


class Stop(msgspec.Struct, tag="stop"):
    """The run has ended."""


class News(msgspec.Struct, tag="news"):
    """What replicas have told in a window: when, and which."""

    news: list[tuple[float, int, FeedMessage]]


class Ended(msgspec.Struct, tag="ended"):
    """The replicas, to ``Stop``."""

    replicas: list[EndedReplica]


class Failed(msgspec.Struct, tag="failed"):
    """The replicas' process has come to an error."""

    why: str


def can_part(cluster: SimCluster) -> bool:
    """Whether there are so many replicas that it is sooner done in two processes, and nothing but what gateways send
    and replicas tell passes between them.
    """
    config = cluster.config
    return (
        len(cluster.replicas) >= MIN_REPLICAS
        and config.num_gateways == 1
        and config.hold is not None  # replicas refuse nothing: they get what they can start
        and config.scaling is None
        and not (config.stalls or config.has_shared_pool)
        and config.feed_delay_s > 0
        and "fork" in multiprocessing.get_all_start_methods()
    )


def run_beside(cluster: SimCluster) -> None:
    """Run what has been set to arrive to its end, the replicas in a process of their own: they are gone from the
    cluster afterwards, but for what ``ended`` tells.

    Raises:
        RuntimeError: an error in that process.
    """
    here, there = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_step_replicas, args=(cluster, there, here))
    process.start()
    there.close()
    try:
        cluster.ended_beside = _serve_gateways(cluster, Channel(here, News | Ended | Failed))
    finally:
        here.close()
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _window_s(cluster: SimCluster) -> float:
    return cluster.config.feed_delay_s / WINDOWS / ROUNDING


def _serve_gateways(cluster: SimCluster, channel: Channel[News | Ended | Failed]) -> list[EndedReplica]:
    loop, delay_s = cluster.loop, cluster.config.feed_delay_s
    replica_ids, window_s = list(cluster.replicas), _window_s(cluster)
    cluster.replicas.clear()
    orders: list[tuple[float, int, Order]] = []
    for gateway in cluster.gateways:
        gateway.targets = {name: _Remote(number, loop, orders) for number, name in enumerate(replica_ids)}
    window, num_left = 0, 2 * WINDOWS + 1  # windows after the last token: until the last news have come
    while num_left:
        if window >= WINDOWS:
            for told_s, number, message in _expect(channel, News).news:
                loop.at(told_s + delay_s, partial(cluster.hear, replica_ids[number], message))
        window += 1
        loop.run_until(window * window_s)
        channel.send(Orders(orders))
        orders.clear()
        num_left -= not cluster.book.num_open
    channel.send(Stop())
    for _ in range(WINDOWS):
        _expect(channel, News)
    return _expect(channel, Ended).replicas


def _step_replicas(cluster: SimCluster, there: socket.socket, here: socket.socket) -> None:
    """In the other process."""
    here.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it: by closing its side
    channel: Channel[Orders | Stop] = Channel(there, Orders | Stop)
    try:
        _obey(cluster, channel)
    except (EOFError, ConnectionError):
        pass
    except Exception:
        channel.send(Failed(traceback.format_exc()))


def _obey(cluster: SimCluster, channel: Channel[Orders | Stop]) -> None:
    loop, requests, block_size = cluster.loop, cluster.book.requests, cluster.config.cache.block_size
    replicas = list(cluster.replicas.values())
    news: list[tuple[float, int, FeedMessage]] = []

    def publish(number: int, replica: SimReplica, message: FeedMessage) -> None:
        news.append((loop.now, number, message))

    for number, replica in enumerate(replicas):
        replica.publish = partial(publish, number)
    loop.stop()  # what has been set is for gateways
    cluster.start_beats()
    window, window_s = 0, _window_s(cluster)
    while not isinstance(message := channel.receive(), Stop):
        for sent_s, number, order in message.orders:
            loop.run_until(sent_s)
            request = requests[order.request_id]
            replicas[number].place(order, request, request.block_hashes(block_size))
        window += 1
        loop.run_until(window * window_s)
        channel.send(News(news))
        news.clear()
    channel.send(Ended([replica.ended() for replica in replicas]))


class _Remote:
    """A replica of the other process, as gateways reach it."""

    draining = False

    def __init__(self, number: int, loop: EventLoop, orders: list[tuple[float, int, Order]]) -> None:
        self._number = number
        self._loop = loop
        self._orders = orders

    def place(self, order: Order, request: SimRequest, block_hashes: tuple[BlockHash, ...]) -> None:
        self._orders.append((self._loop.now, self._number, order))

    def hand_back(self, request_id: str) -> bool:
        """Without faults nothing stalls: what has been sent stays."""
        return False

    def wish(self, gateway_id: str, wishes: tuple[Wish, ...]) -> None:
        """There are no other gateways to tell."""


def _expect(channel: Channel[News | Ended | Failed], kind: type[Message]) -> Message:
    message = channel.receive()
    if isinstance(message, Failed):
        raise RuntimeError(f"the process of the replicas has failed:\n{message.why}")
    assert isinstance(message, kind)
    return message
