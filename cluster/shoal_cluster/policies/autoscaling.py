"""How many replicas there should be: up at once for load that is certain, down late and only when it is safe."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_need import Load, measure, needs, predicted_ttft, replica_rate
from shoal_cluster.policies.autoscaling_observe import num_silent, observe, reporting, told
from shoal_cluster.policies.autoscaling_reserve import remember_offered
from shoal_cluster.policies.autoscaling_state import ScaleDecision, ScaleState
from shoal_cluster.policies.autoscaling_view import ScaleRecord, ScaleView

SLACK = 0.85  # fewer replicas must do with this share of the target, so that a count barely needed is kept
REGRET_S = 300.0
"""For so long after a step down, a slightly higher need does not bring the former count back. If a greater one does,
the step down was a mistake, and patience doubles.
"""
MAX_PATIENCE = 4
SMALL_STEP, SMALL_STEP_PATIENCE = 0.1, 3  # a step down that saves less than this share waits this many times as long
DOWN_PAUSE_S = 30.0  # between steps down: one larger step rather than many small ones
STUCK_STARTS = 4.0  # a start that takes this many times as long as expected is reported as stuck


def desired_replicas(view: ScaleView, state: ScaleState, config: ScaleConfig, now: float) -> ScaleDecision:
    """Replicas for the load that is there and the load that is coming, at ``config``'s targets and within its bounds.

    Up: at once, to the greatest need (blocks, sequences, compute, queue, reserve). A replica that does not report adds
    to no need. Down: to the most that was needed in ``downscale_delay_s``, with some slack, if that many of the
    smallest replicas carry all that the present ones hold; and only if every replica and gateway has reported all that
    time. Replicas that start, or fail to, block no decision; only the queue's need counts on them. ``now`` is Unix
    time.

    With a ``downscale_delay_s`` of at least REGRET_S, no count is returned to within REGRET_S of leaving it: a count
    that was given up is not asked for again, but one more is. Exceptions: from 0, to the maximum, and by bounds.
    """
    state = observe(view, state, now)
    load = measure(view, state, config, now)
    if (served := replica_rate(load, state)) is not None or not load.rate_lasting:
        offered = load.rate_lasting / served if served is not None else 0.0
        state = replace(state, offered=remember_offered(offered, state, config, now))
    regrets = state.last_down_s is not None and now - state.last_down_s < REGRET_S
    needed = needs(load, state, config, min(1.0, config.target_utilization / (SLACK if regrets else 1.0)), now)
    if regrets and _whole(needed, load, view, state) > view.num_target:  # by more than a little: then all of it at once
        needed = needs(load, state, config, config.target_utilization, now)
    num_needed = _whole(needed, load, view, state)
    num_careful = _whole(needs(load, state, config, SLACK * config.target_utilization, now), load, view, state)
    delay_s = config.downscale_delay_s * state.patience
    state = state.with_need(now, num_careful, SMALL_STEP_PATIENCE * delay_s)
    if num_needed > view.num_target:
        nothing = "requests that are held" if load.num_held else "nothing known"
        why = max(needed, key=lambda name: needed[name]) if needed else nothing
        count, reason = _up(view, state, config, num_needed, why, now)
    else:
        count, reason = _down(view, state, config, num_needed, delay_s, now)
    scheduled = config.scheduled_replicas(now, state.expected_startup_s)
    floor = min(max(config.min_replicas, scheduled), config.max_replicas)  # a tuned maximum may be below a schedule
    bounded = min(max(count, floor), config.max_replicas)
    if bounded != count:
        kind = "up" if bounded > view.num_target else "down" if bounded < view.num_target else "hold"
        reason = f"{kind}: {_bounds(config, floor)}; the load alone: {reason}"
    terms = _terms(view, state, load, needed, num_careful, now)
    return ScaleDecision(bounded, reason, terms, _remember(state, view.num_target, count, bounded, delay_s, now))


def scale_record(
    view: ScaleView, state: ScaleState, config: ScaleConfig, now: float, decision: ScaleDecision
) -> ScaleRecord:
    """``decision`` with its inputs: the arguments of ``desired_replicas``."""
    return ScaleRecord(
        seq=0,
        time_s=now,
        num_before=view.num_target,
        num_after=decision.num_replicas,
        num_running=len(view.replicas),
        num_starting=max(0, view.num_target - len(view.replicas)),
        reason=decision.reason,
        terms=decision.terms,
        replicas=view.replicas,
        config=config,
        demand=view.demand,
        partial_demand=view.partial_demand,
        state=state,
    )


def replay(record: ScaleRecord) -> ScaleDecision:
    """Decide again from a record that has its state: the same count, reason and terms.

    Raises:
        ValueError: the record has no state.
    """
    if record.state is None:
        raise ValueError(f"state: record {record.seq} has none; only records of changes keep it")
    view = ScaleView(
        replicas=record.replicas,
        num_target=record.num_before,
        demand=record.demand,
        partial_demand=record.partial_demand,
    )
    return desired_replicas(view, record.state, record.config, record.time_s)


def _whole(needed: dict[str, float], load: Load, view: ScaleView, state: ScaleState) -> int:
    """The greatest need in whole replicas. 0 only if nothing runs, waits or comes, or nothing has ever reported."""
    count = max((math.ceil(n - 1e-9) for n in needed.values()), default=0)
    if load.num_shed and view.num_target <= len(view.replicas):
        count = max(count, view.num_target + 1)  # requests were refused: what runs is too little, whatever needs say
    if load.is_idle and (view.demand is not None or not (state.samples or view.num_target)):
        return count
    return max(1, count)


def _up(
    view: ScaleView, state: ScaleState, config: ScaleConfig, num_needed: int, why: str, now: float
) -> tuple[int, str]:
    """What is needed; more if just that count was given up too early, which shows how much the load varies."""
    count, reason = num_needed, f"up: {num_needed} needed for {why}"
    left = {n for time_s, n in state.left if now - time_s <= REGRET_S}
    while view.num_target and count in left and count < config.max_replicas:
        count += 1
    if count > num_needed:
        reason = f"{reason}; {count}, for {num_needed} were given up less than {REGRET_S:.0f} s ago"
    return count, reason


def _down(
    view: ScaleView, state: ScaleState, config: ScaleConfig, num_needed: int, delay_s: float, now: float
) -> tuple[int, str]:
    """As few replicas as were enough for long enough, by load alone, and why not fewer."""
    target = view.num_target
    if state.seen_since_s is None:
        if view.demand is None:
            return target, "hold: a gateway does not report"
        count = num_silent(view.replicas)
        who = f"{count} of {len(view.replicas)} replicas" if count else "the cluster"
        return target, f"hold: {who} {'do' if count > 1 else 'does'} not report"
    peak = state.peak_need(now - delay_s, target)
    if 0 < target - peak < SMALL_STEP * target:
        delay_s *= SMALL_STEP_PATIENCE
        peak = state.peak_need(now - delay_s, target)
    if peak >= target:
        return target, f"hold: {num_needed} needed now, {peak} within {delay_s:.0f} s"
    seen_s = now - state.seen_since_s
    if seen_s < delay_s:
        return target, f"hold: {peak} would do, if that lasts for {delay_s - seen_s:.0f} s more"
    if state.last_down_s is not None and now - state.last_down_s < DOWN_PAUSE_S:
        return target, f"hold: {peak} would do; the last step down was {now - state.last_down_s:.0f} s ago"
    count = max(peak, _survivors(view, config), 1 if target > 1 else 0)  # Serve goes to 0 only from 1
    if count >= target:
        return target, f"hold: {peak} would do by load, but could not carry what the present {target} hold"
    return count, f"down: {peak} were enough for {delay_s:.0f} s"


def _survivors(view: ScaleView, config: ScaleConfig) -> int:
    """The least number of the smallest replicas that could carry all that the present ones hold and have waiting. What
    one that drains holds goes to the others; if these could not carry all, none can be spared.
    """
    held = [stats for row in view.replicas if (stats := told(row)) is not None]
    num_blocks = sum(s.num_allocated_blocks + s.num_waiting_tokens / s.block_size for s in held)
    num_sequences = sum(s.num_running + s.num_waiting for s in held)
    blocks, seqs = 0.0, 0.0
    by_size = sorted(reporting(view.replicas), key=lambda s: (s.num_total_blocks, s.max_num_seqs))
    for count, stats in enumerate(by_size):
        if num_blocks <= blocks and num_sequences <= seqs:
            return count
        blocks += config.target_utilization * stats.num_total_blocks
        seqs += config.target_utilization * stats.max_num_seqs
    return len(by_size) if num_blocks <= blocks and num_sequences <= seqs else len(view.replicas)


def _remember(state: ScaleState, before: int, by_load: int, after: int, delay_s: float, now: float) -> ScaleState:
    """With this step. One that only the bounds have forced tells nothing of the load: it cannot prove hasty."""
    if after < before <= by_load:
        return state
    if after < before:
        left = (*((t, count) for t, count in state.left if now - t <= REGRET_S), (now, before))
        return replace(state, last_down_s=now, left=left)
    if after > before:
        state = state.with_need(now, after, SMALL_STEP_PATIENCE * delay_s)  # kept as long as any other need
        if state.last_down_s is not None:
            hasty = now - state.last_down_s < REGRET_S
            patience = min(MAX_PATIENCE, 2 * state.patience) if hasty else max(1, state.patience // 2)
            return replace(state, patience=patience, last_down_s=None)
    return state


def _bounds(config: ScaleConfig, floor: int) -> str:
    by_clock = ", by schedule" if floor > config.min_replicas else ""
    return f"from {floor}{by_clock} to {config.max_replicas} replicas are allowed"


def _terms(
    view: ScaleView, state: ScaleState, load: Load, needed: dict[str, float], num_careful: int, now: float
) -> tuple[tuple[str, float], ...]:
    known = reporting(view.replicas)
    total = sum(s.num_total_blocks for s in known)
    terms = {
        "utilization": sum(s.num_allocated_blocks for s in known) / total if total else 0.0,
        "waiting_tokens": float(load.num_waiting_tokens),
        "requests_per_s": load.rate,
        "requests_per_s_ahead": load.rate_ahead,
        "num_shed": float(load.num_shed),
        **{f"needed_for_{name}": n for name, n in needed.items()},
        "needed_with_slack": float(num_careful),
        "num_silent": float(num_silent(view.replicas)),
        "startup_s": state.expected_startup_s,
    }
    if (ttft_s := predicted_ttft(load, state)) is not None and math.isfinite(ttft_s):
        terms["predicted_ttft_s"] = ttft_s
    if load.replica_tokens_per_s is not None:
        terms["replica_tokens_per_s"] = load.replica_tokens_per_s
    if state.pending_s and now - state.pending_s[0] > STUCK_STARTS * state.expected_startup_s:
        terms["stuck_s"] = now - state.pending_s[0]
    return tuple(terms.items())
