"""Replicas held ready for a load that jumps: one asked for only then would serve a start-up time later."""

from __future__ import annotations

import math

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_state import Falling, ScaleState

MEMORY_PARTS = 60  # of ``burst_memory_s``: peaks of one such part are kept as one


def reserve(offered: float, state: ScaleState, config: ScaleConfig) -> float:
    """How many full replicas to hold for ``offered`` and for what it may become while more start.

    ``offered`` is the load as a number of full replicas. What it was within ``burst_memory_s`` it may be again. A jump
    beyond that is bounded by ``headroom`` times its square root: a load of many independent users jumps by less, in
    proportion, than one of a few (the square-root staffing rule, Halfin and Whitt 1981).
    """
    before = state.offered[0][1] if state.offered else 0.0
    return max(before, offered + config.headroom * math.sqrt(offered))


def remember_offered(offered: float, state: ScaleState, config: ScaleConfig, now: float) -> Falling:
    """Peaks of the offered load, with the latest added and those older than ``burst_memory_s`` forgotten."""
    kept = tuple((t, n) for t, n in state.offered if n > offered and t > now - config.burst_memory_s)
    if kept and now - kept[-1][0] < config.burst_memory_s / MEMORY_PARTS:
        return kept
    return (*kept, (now, offered)) if config.burst_memory_s else ()
