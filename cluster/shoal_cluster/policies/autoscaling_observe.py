"""Enters snapshots into memory: arrivals, what replicas did since the last look, how long they take to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from msgspec import structs

from shoal_cluster.policies.autoscaling_state import Capacity, HeldPerRate, Progress, Sample, ScaleState
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_replica.stats import ReplicaStats

MAX_AGE_S = 10.0  # older stats count as missing
SAMPLE_PERIOD_S = 1.0
MEMORY_S = 125.0
COST_PERIOD_S = 5.0  # a prompt counts when it begins, but takes several steps: over less, tokens and time do not match
HELD_S, MIN_ENDED = 60.0, 10  # what requests hold is learnt over this long, if this many ended
HELD_MEMORY = 0.9
MAX_COMPUTE = 0.9  # cap on the measured share of the time that prompts take
STARTUP_MEMORY = 0.5  # share of the estimate that remains after each new start


def told(row: ReplicaView) -> ReplicaStats | None:
    """Stats of a replica that is heard and makes progress, None of others."""
    return row.stats if row.connected and row.age_s <= MAX_AGE_S and not row.stalled else None


def num_silent(replicas: Sequence[ReplicaView]) -> int:
    """How many replicas are not heard, or make no progress."""
    return sum(told(row) is None for row in replicas)


def reporting(replicas: Sequence[ReplicaView]) -> list[ReplicaStats]:
    """Stats of replicas that are heard and make progress. One that drains adds no room, and its load is ending."""
    return [stats for row in replicas if (stats := told(row)) is not None and not stats.draining]


def observe(view: ScaleView, state: ScaleState, now: float) -> ScaleState:
    """Enter a snapshot into memory. Samples are at least a second apart. If the clock goes back, the past is forgotten
    but for the peaks of the load, which are then dated now at the latest.

    No samples are taken while a gateway is silent: what arrives there is not known. Time in which nobody looked, or by
    which the clock has been set forward, counts as time in which nobody has reported.
    """
    known = reporting(view.replicas)
    if state.samples and now < state.samples[-1].time_s:
        state = _without_times(state, now)
    gap_s = 0.0 if state.looked_s is None else now - state.looked_s
    has_gap = gap_s > MAX_AGE_S
    if has_gap:
        state = replace(state, seen_since_s=None, pending_s=tuple(asked_s + gap_s for asked_s in state.pending_s))
    state = _note_starts(view, replace(state, looked_s=now), now, learns=not has_gap)
    is_blind = num_silent(view.replicas) > 0 or view.demand is None or (not known and view.num_target > 0)
    seen_since_s = None if is_blind else (now if state.seen_since_s is None else state.seen_since_s)
    state = replace(state, seen_since_s=seen_since_s, capacity=_capacity(known) or state.capacity)
    if view.demand is None or (state.samples and now - state.samples[-1].time_s < SAMPLE_PERIOD_S):
        return state
    return _sample(view, view.demand, known, state, now)


def _without_times(state: ScaleState, now: float) -> ScaleState:
    """Without all that is kept by its time, which may lie far ahead; the load's peaks are kept for as long again."""
    return replace(
        state,
        samples=(),
        progress=MappingProxyType({}),
        needs=(),
        offered=tuple((min(time_s, now), value) for time_s, value in state.offered),
        seen_since_s=None,
        pending_s=(),
        last_down_s=None,
        left=(),
    )


def _note_starts(view: ScaleView, state: ScaleState, now: float, learns: bool) -> ScaleState:
    """Match replicas that have come up with those that were asked for, in the order of asking. It ``learns`` how long
    they took if it saw when they came up.
    """
    num_running = len(view.replicas)
    num_starting = max(0, view.num_target - num_running)
    pending, startup_s = list(state.pending_s), state.startup_s
    for _ in range(min(num_running - state.num_running, len(pending))):
        took_s = now - pending.pop(0)
        if learns:
            startup_s = took_s if startup_s is None else STARTUP_MEMORY * startup_s + (1 - STARTUP_MEMORY) * took_s
    pending = pending[:num_starting] + [now] * (num_starting - len(pending))
    return replace(state, pending_s=tuple(pending), startup_s=startup_s, num_running=num_running)


def _capacity(known: Sequence[ReplicaStats]) -> Capacity | None:
    """The smallest of each size: what another replica is certain to have."""
    if not known:
        return None
    return Capacity(
        min(s.num_total_blocks for s in known),
        known[0].block_size,
        min(s.max_num_seqs for s in known),
        min(s.max_num_batched_tokens for s in known),
    )


def _sample(
    view: ScaleView, demand: Demand, known: Sequence[ReplicaStats], state: ScaleState, now: float
) -> ScaleState:
    cost, progress = state.cost, {}
    num_begun = num_computed = num_finished = 0
    for row in view.replicas:
        if (stats := row.stats) is None:
            continue
        before = state.progress.get(row.replica_id)
        done = Progress(now, stats.num_steps, _computed(stats), stats.busy_s, stats)
        progress[row.replica_id] = done
        if before is None and stats.busy_s < COST_PERIOD_S:  # it is new: all that it has done counts
            before = Progress(
                now, 0, 0, 0.0, structs.replace(stats, num_prompt_tokens=0, num_cached_tokens=0, num_finished=0)
            )
        if before is None:
            continue
        num_begun += max(0, stats.num_prompt_tokens - before.last.num_prompt_tokens)
        num_computed += max(0, _computed(stats) - _computed(before.last))
        num_finished += max(0, stats.num_finished - before.last.num_finished)
        if now - before.time_s < COST_PERIOD_S and cost.tokens_tokens:  # a rough first idea is better than none
            progress[row.replica_id] = replace(before, last=stats)
        elif done.busy_s > before.busy_s:
            num_tokens = max(0, done.num_computed_tokens - before.num_computed_tokens)
            cost = cost.add(done.num_steps - before.num_steps, num_tokens, done.busy_s - before.busy_s)
    last = state.samples[-1] if state.samples else None
    sample = Sample(
        time_s=now,
        num_requests=demand.num_requests,
        num_prompt_tokens=demand.num_prompt_tokens,
        num_shed=demand.num_shed,
        num_begun_tokens=num_begun + (last.num_begun_tokens if last is not None else 0),
        num_computed_tokens=num_computed + (last.num_computed_tokens if last is not None else 0),
        num_finished=num_finished + (last.num_finished if last is not None else 0),
        num_allocated_blocks=sum(s.num_allocated_blocks for s in known),
        num_running=sum(s.num_running for s in known),
    )
    kept = [s for s in state.samples if s.time_s > now - MEMORY_S]
    if last is not None and any(new < old for new, old in zip(_totals(sample), _totals(last), strict=True)):
        kept = []  # whoever counts has begun anew
    state = replace(state, samples=(*kept, sample), progress=MappingProxyType(progress), cost=cost)
    return replace(state, held=_learn_held(state, now))


def _totals(sample: Sample) -> tuple[int, int, int]:
    return sample.num_requests, sample.num_prompt_tokens, sample.num_shed


def uncached_share(known: Sequence[ReplicaStats]) -> float:
    """Share of prompt tokens that need compute, by the replicas' totals; 1 before there are any."""
    num_prompt = sum(s.num_prompt_tokens for s in known)
    return 1 - sum(s.num_cached_tokens for s in known) / num_prompt if num_prompt else 1.0


def _computed(stats: ReplicaStats) -> int:
    return stats.num_prompt_tokens - stats.num_cached_tokens


def _learn_held(state: ScaleState, now: float) -> HeldPerRate | None:
    """By Little's law over the last HELD_S. The rate is the mean of what began and what ended, which also holds on a
    ramp.

    Prefill and decoding share each step: where prompts take a share c of the time, a sequence that decodes stays
    1 / (1 - c) times as long. What is kept is what would be held if there were no prompts to compute.
    """
    samples = [s for s in state.samples if s.time_s >= now - HELD_S]
    pace = None if state.capacity is None else state.cost.tokens_per_s(state.capacity.max_num_batched_tokens)
    first, last = samples[0], samples[-1]
    span_s, num_came = last.time_s - first.time_s, last.num_requests - first.num_requests
    num_ended = last.num_finished - first.num_finished
    if pace is None or not state.num_running or num_ended < MIN_ENDED or num_came <= 0:
        return state.held
    request_tokens = (last.num_prompt_tokens - first.num_prompt_tokens) / num_came
    num_begun = (last.num_begun_tokens - first.num_begun_tokens) / max(1.0, request_tokens)
    rate = (num_begun + num_ended) / 2 / span_s
    num_computed = last.num_computed_tokens - first.num_computed_tokens
    alone = 1 - min(MAX_COMPUTE, num_computed / (pace * state.num_running * span_s))
    blocks = alone * sum(s.num_allocated_blocks for s in samples) / len(samples) / rate
    sequences = alone * sum(s.num_running for s in samples) / len(samples) / rate
    if state.held is None:
        return HeldPerRate(blocks, sequences)
    old = state.held
    return HeldPerRate(
        HELD_MEMORY * old.blocks_per_rate + (1 - HELD_MEMORY) * blocks,
        HELD_MEMORY * old.sequences_per_rate + (1 - HELD_MEMORY) * sequences,
    )
