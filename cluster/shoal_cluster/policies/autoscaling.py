"""How many replicas there should be: up at once by what the ledger shows, down late and only when it is safe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleView

MAX_AGE_S = 10.0  # older stats count as missing


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Carried from one decision to the next: since when fewer were enough, and the most needed in that time."""

    enough_since_s: float | None = None
    peak_needed: int = 0


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    num_replicas: int
    reason: str
    terms: tuple[tuple[str, float], ...]
    state: ScaleState


def desired_replicas(view: ScaleView, state: ScaleState, config: ScaleConfig, now: float) -> ScaleDecision:
    """Replicas needed for the blocks held and the tokens waiting, at ``config``'s targets.

    More are asked for at once, several if need be. Fewer only after the smaller count would have been enough,
    survivors staying under target, at every look for ``downscale_delay_s``, and never below the most that were needed
    in that time. A replica that is missing, starting or stale adds no load and forbids shrinking. Bounds always hold.
    """
    known = [
        row.stats
        for row in view.replicas
        if row.stats is not None and row.connected and row.age_s <= MAX_AGE_S and not row.stats.draining
    ]
    num_silent = max(0, view.num_target - len(known))
    held = sum(s.num_allocated_blocks for s in known)
    total = sum(s.num_total_blocks for s in known)
    waiting = sum(s.num_waiting_tokens for s in known) + sum(r.num_reserved_tokens for r in view.replicas)
    utilization = held / total if total else 0.0
    for_blocks = _needed(utilization * len(known), config.target_utilization)
    for_waiting = _needed(waiting, config.target_waiting_tokens)
    num_held = view.demand.num_held if view.demand is not None else 1
    is_idle = not (num_held or waiting or any(s.num_running for s in known))
    needed = max(for_blocks, for_waiting, 0 if is_idle and view.num_target <= 1 else 1)  # Serve goes to 0 from 1 only
    terms = (
        ("utilization", utilization),
        ("waiting_tokens", float(waiting)),
        ("needed_for_blocks", float(for_blocks)),
        ("needed_for_waiting", float(for_waiting)),
        ("num_silent", float(num_silent)),
    )

    def decide(count: int, reason: str, next_state: ScaleState) -> ScaleDecision:
        bounded = min(max(count, config.min_replicas), config.max_replicas)
        if bounded != count:
            reason += f"; bounds are {config.min_replicas} to {config.max_replicas}"
        return ScaleDecision(bounded, reason, terms, next_state)

    load = f"{utilization:.0%} of blocks held, {waiting} tokens wait"
    if needed > view.num_target:
        return decide(needed, f"up: {load}", ScaleState())
    if num_silent:
        return decide(view.num_target, f"hold: {num_silent} of {view.num_target} replicas do not report", ScaleState())
    if needed == view.num_target:
        return decide(view.num_target, f"hold: {load}", ScaleState())
    since_s = now if state.enough_since_s is None else state.enough_since_s
    peak = max(needed, state.peak_needed)
    if now - since_s < config.downscale_delay_s or peak >= view.num_target:
        left_s = config.downscale_delay_s - (now - since_s)
        reason = f"hold: {load}; {needed} would do, down in {max(0.0, left_s):.0f} s if that lasts"
        return decide(view.num_target, reason, ScaleState(since_s, peak))
    return decide(peak, f"down: {load}; {peak} were enough for {now - since_s:.0f} s", ScaleState())


def _needed(load: float, target_per_replica: float) -> int:
    """Least number of replicas that carry ``load`` at no more than the target each."""
    return math.ceil(load / target_per_replica - 1e-9)
