"""Capacity planning: the fastest traffic that a cluster carries, and the smallest cluster that carries a traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.run import seldom_collected
from shoal_cluster.sim.workload import SimRequest, speed_up

DEFAULT_GOODPUT = 0.9
MAX_SPEED, MAX_REPLICAS = 1024.0, 4096
CHECK_INTERVAL_S = 1.0

Watch = Callable[[SimCluster], AbstractContextManager[object]]
"""What is entered while a cluster runs, to see how far it is."""


def carries(config: SimConfig, requests: Sequence[SimRequest], goodput: float, watch: Watch = nullcontext) -> bool:
    """Whether at least that share of ``requests`` is served within the objective.

    Ends as soon as it is decided that it is not; a run that goes to its end is checked like any other.
    """
    cluster = SimCluster(config)
    for request in requests:
        cluster.arrive(request)
    allowed = (1 - goodput) * len(requests) + 1e-9

    def check() -> None:
        if not cluster.book.num_open:
            return
        if cluster.book.num_missed > allowed:
            cluster.loop.stop()
        else:
            cluster.loop.after(CHECK_INTERVAL_S, check)

    cluster.loop.after(0.0, check)
    with watch(cluster), seldom_collected():
        cluster.loop.run()
    if not cluster.book.num_open:
        check_conservation(cluster)
    return cluster.book.num_missed <= allowed


def find_capacity(
    config: SimConfig,
    requests: Sequence[SimRequest],
    *,
    goodput: float = DEFAULT_GOODPUT,
    tolerance: float = 0.02,
    on_probe: Callable[[float, bool], None] = lambda speed, ok: None,
    watch: Watch = nullcontext,
) -> float:
    """The highest speed of ``requests`` at which ``config`` carries them, to within ``tolerance`` of itself.

    Bisection: goodput is taken to fall with speed. 0 if even the slowest tried is too fast, ``MAX_SPEED`` if none is.

    Args:
        on_probe: told each speed tried and whether it was carried.
    """

    def probe(speed: float) -> bool:
        ok = carries(config, speed_up(requests, speed), goodput, watch)
        on_probe(speed, ok)
        return ok

    low, high = 0.0, 1.0
    while high <= MAX_SPEED and probe(high):
        low, high = high, high * 2
    if low == MAX_SPEED:
        return low
    if not low:
        low = high / 2
        while not probe(low):
            low, high = low / 2, low
            if low < 1 / MAX_SPEED:
                return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if probe(middle) else (low, middle)
    return low


def find_replicas(
    config: SimConfig,
    requests: Sequence[SimRequest],
    *,
    goodput: float = DEFAULT_GOODPUT,
    on_probe: Callable[[int, bool], None] = lambda count, ok: None,
    watch: Watch = nullcontext,
) -> int:
    """The least number of replicas that carry ``requests``. 0 if none does.

    Tried are up to ``MAX_REPLICAS``, and no more than the requests: with a replica each, more are no help.
    """

    def probe(count: int) -> bool:
        ok = carries(replace(config, num_replicas=count), requests, goodput, watch)
        on_probe(count, ok)
        return ok

    most = min(MAX_REPLICAS, max(1, len(requests)))
    low, high = 0, 1
    while not probe(high):
        if high == most:
            return 0
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if probe(middle) else (middle, high)
    return high
