"""Capacity planning: the highest load that a cluster carries, and the smallest cluster that carries a given load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal_cluster.sim.channel import num_cores
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.run import seldom_collected
from shoal_cluster.sim.search import Find, Found, Point, Probe, Tell, search_ahead
from shoal_cluster.sim.workload import MAX_ARRIVAL_S, SimRequest, speed_up

DEFAULT_GOODPUT = 0.9
MAX_SPEED, MAX_REPLICAS = 1024.0, 4096
CHECK_INTERVAL_S = 1.0


def carries(
    config: SimConfig, requests: Sequence[SimRequest], goodput: float, tell: Tell = lambda num_done: None
) -> bool:
    """Whether at least a share ``goodput`` of ``requests`` is served within the objective.

    The run stops as soon as the answer is certain to be no; one that completes is checked like any other run.
    """
    cluster = SimCluster(config)
    for request in requests:
        cluster.arrive(request)
    allowed = (1 - goodput) * len(requests) + 1e-9

    def check() -> None:
        tell(len(requests) - cluster.book.num_open)
        if not cluster.book.num_open:
            return
        if cluster.book.num_missed > allowed:
            cluster.loop.stop()
        else:
            cluster.loop.after(CHECK_INTERVAL_S, check)

    cluster.loop.after(0.0, check)
    with seldom_collected():
        cluster.loop.run()
    if not cluster.book.num_open:
        check_conservation(cluster)
    return cluster.book.num_missed <= allowed


def find_capacity(
    config: SimConfig,
    requests: Sequence[SimRequest],
    goodput: float = DEFAULT_GOODPUT,
    *,
    tolerance: float = 0.02,
    on_probe: Callable[[float, bool], None] = lambda speed, ok: None,
    tell: Tell = lambda num_done: None,
    ahead: bool = False,
) -> float:
    """The highest speed at which ``config`` carries ``requests``, to a relative ``tolerance``.

    Bisection, on the assumption that goodput falls as speed rises. Returns 0 if even the slowest speed tried is too
    fast, ``MAX_SPEED`` if none is.

    Args:
        on_probe: called with each speed tried and whether it was carried.
        tell: called with the number of requests done in the current probe.
        ahead: run the probes that may come next on idle cores; see ``search_ahead``.
    """

    last_s = max((request.arrival_s for request in requests), default=0.0)

    def probe(speed: float, tell: Tell) -> bool:
        if last_s / speed > MAX_ARRIVAL_S:  # too slow to simulate: counts as not carried
            return False
        return carries(config, speed_up(requests, speed), goodput, tell)

    return _search(lambda is_carried: _fastest(is_carried, tolerance), probe, on_probe, tell, ahead)


def _fastest(is_carried: Callable[[float], bool], tolerance: float) -> float:
    low, high = 0.0, 1.0
    while high <= MAX_SPEED and is_carried(high):
        low, high = high, high * 2
    if low == MAX_SPEED:
        return low
    if not low:
        low = high / 2
        while not is_carried(low):
            low, high = low / 2, low
            if low < 1 / MAX_SPEED:
                return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_carried(middle) else (low, middle)
    return low


def find_replicas(
    config: SimConfig,
    requests: Sequence[SimRequest],
    goodput: float = DEFAULT_GOODPUT,
    *,
    on_probe: Callable[[int, bool], None] = lambda count, ok: None,
    tell: Tell = lambda num_done: None,
    ahead: bool = False,
) -> int:
    """The smallest number of replicas that carries ``requests``; 0 if none does. Arguments as for ``find_capacity``.

    The search stops at ``MAX_REPLICAS`` or at one replica per request, beyond which more do not help.
    """

    def probe(count: int, tell: Tell) -> bool:
        return carries(replace(config, num_replicas=count), requests, goodput, tell)

    most = min(MAX_REPLICAS, max(1, len(requests)))
    return _search(lambda is_carried: _fewest(is_carried, most), probe, on_probe, tell, ahead)


def _fewest(is_carried: Callable[[int], bool], most: int) -> int:
    low, high = 0, 1
    while not is_carried(high):
        if high == most:
            return 0
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_carried(middle) else (middle, high)
    return high


def _search(
    find: Find[Point, Found],
    probe: Probe[Point],
    on_probe: Callable[[Point, bool], None],
    tell: Tell,
    ahead: bool,
) -> Found:
    if ahead and sys.platform == "linux" and num_cores() > 1:  # elsewhere a forked child may not be able to continue
        return search_ahead(find, probe, on_probe, tell)

    def try_(point: Point) -> bool:
        ok = probe(point, tell)
        on_probe(point, ok)
        return ok

    return find(try_)
