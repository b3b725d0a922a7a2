"""From a snapshot to memory: arrivals, what replicas did since the last look, and how long they take to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from shoal_cluster.policies.autoscaling_state import Capacity, Held, Progress, Sample, ScaleState, growth
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView
from shoal_cluster.policies.view import ReplicaView
from shoal_replica.stats import ReplicaStats

MAX_AGE_S = 10.0  # older stats count as missing
SAMPLE_PERIOD_S = 1.0
MEMORY_S = 125.0
COST_PERIOD_S = 5.0  # a prompt counts when it is begun and takes some steps: over less, tokens and time do not match
STEADY_S = 60.0  # over which as many requests must end as come, within a share and of a number, to learn what they hold
STEADY_WITHIN, MIN_STEADY = 0.1, 30
MAX_COMPUTE = 0.9  # share of compute beyond which nothing is inferred from what is held
STARTUP_MEMORY = 0.5  # of the estimate that remains after each new start


def reporting(replicas: Sequence[ReplicaView]) -> list[ReplicaStats]:
    """Stats of the replicas that are heard of. One that drains adds no room, and its load is about to end."""
    return [
        row.stats
        for row in replicas
        if row.stats is not None and row.connected and row.age_s <= MAX_AGE_S and not row.stats.draining
    ]


def observe(view: ScaleView, state: ScaleState, now: float) -> ScaleState:
    """Enter a snapshot into memory. Samples are a second apart at least; a clock that goes back forgets the past."""
    known = reporting(view.replicas)
    state = _note_starts(view, state, now)
    is_blind = len(known) < len(view.replicas) or view.demand is None or (not known and view.num_target > 0)
    seen_since_s = None if is_blind else (now if state.seen_since_s is None else state.seen_since_s)
    state = replace(state, seen_since_s=seen_since_s, capacity=_capacity(known) or state.capacity)
    if state.samples and now < state.samples[-1].time_s:
        state = replace(state, samples=(), needs=(), seen_since_s=None)
    if state.samples and now - state.samples[-1].time_s < SAMPLE_PERIOD_S:
        return state
    return _sample(view, known, state, now)


def _note_starts(view: ScaleView, state: ScaleState, now: float) -> ScaleState:
    """Match replicas that have come with those that were asked for, first asked first come."""
    num_running = len(view.replicas)
    num_starting = max(0, view.num_target - num_running)
    pending, startup_s = list(state.pending_s), state.startup_s
    for _ in range(min(num_running - state.num_running, len(pending))):
        took_s = now - pending.pop(0)
        startup_s = took_s if startup_s is None else STARTUP_MEMORY * startup_s + (1 - STARTUP_MEMORY) * took_s
    pending = pending[:num_starting] + [now] * (num_starting - len(pending))
    return replace(state, pending_s=tuple(pending), startup_s=startup_s, num_running=num_running)


def _capacity(known: Sequence[ReplicaStats]) -> Capacity | None:
    """The smallest of each: what another replica is sure to have."""
    if not known:
        return None
    return Capacity(
        min(s.num_total_blocks for s in known),
        known[0].block_size,
        min(s.max_num_seqs for s in known),
        min(s.max_num_batched_tokens for s in known),
    )


def _sample(view: ScaleView, known: Sequence[ReplicaStats], state: ScaleState, now: float) -> ScaleState:
    cost, num_finished = state.cost, 0
    progress: dict[str, Progress] = {}
    for row in view.replicas:
        if (stats := row.stats) is None:
            continue
        num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
        done = Progress(now, stats.num_steps, num_computed, stats.busy_s, stats.num_finished)
        before = state.progress.get(row.replica_id)
        if before is None:
            progress[row.replica_id] = done
            continue
        num_finished += max(0, done.num_finished - before.num_finished)
        if now - before.time_s < COST_PERIOD_S:
            progress[row.replica_id] = replace(before, num_finished=done.num_finished)
            continue
        progress[row.replica_id] = done
        if done.busy_s > before.busy_s:
            num_tokens = max(0, done.num_computed_tokens - before.num_computed_tokens)
            cost = cost.add(done.num_steps - before.num_steps, num_tokens, done.busy_s - before.busy_s)
    demand = view.demand or Demand()
    last = state.samples[-1] if state.samples else None
    sample = Sample(
        time_s=now,
        num_requests=demand.num_requests,
        num_prompt_tokens=demand.num_prompt_tokens,
        num_shed=demand.num_shed,
        num_finished=num_finished + (last.num_finished if last is not None else 0),
        num_allocated_blocks=sum(s.num_allocated_blocks for s in known),
        num_running=sum(s.num_running for s in known),
    )
    kept = [s for s in state.samples if s.time_s > now - MEMORY_S]
    if last is not None and sample.num_requests < last.num_requests:
        kept = []  # a gateway has been replaced, or none reports: totals start anew
    state = replace(state, samples=(*kept, sample), progress=MappingProxyType(progress), cost=cost)
    return replace(state, held=_learn_held(state, uncached_share(known), now))


def uncached_share(known: Sequence[ReplicaStats]) -> float:
    """Share of prompt tokens that need compute, by what the replicas have seen."""
    num_prompt = sum(s.num_prompt_tokens for s in known)
    return 1 - sum(s.num_cached_tokens for s in known) / num_prompt if num_prompt else 1.0


def _learn_held(state: ScaleState, uncached: float, now: float) -> Held | None:
    """By Little's law, from the last STEADY_S, if about as many requests ended as came.

    A prompt's compute and decoding share each step: with a share c of the time for prompts, what decodes stays
    1 / (1 - c) times as long. What is kept is what would be held with no prompt to compute.
    """
    samples, held = state.samples, state.held
    came = growth(samples, lambda s: s.num_requests, now - STEADY_S, now, STEADY_S / 2)
    ended = growth(samples, lambda s: s.num_finished, now - STEADY_S, now, STEADY_S / 2)
    tokens_per_s = growth(samples, lambda s: s.num_prompt_tokens, now - STEADY_S, now, STEADY_S / 2)
    if not came or not ended or came * STEADY_S < MIN_STEADY or abs(came - ended) > STEADY_WITHIN * came:
        return held
    pace = None if state.capacity is None else state.cost.tokens_per_s(state.capacity.max_num_batched_tokens)
    if pace is None or not state.num_running:
        return held
    alone = 1 - min(MAX_COMPUTE, (tokens_per_s or 0.0) * uncached / (pace * state.num_running))
    within = [s for s in samples if s.time_s >= now - STEADY_S]
    blocks = alone * sum(s.num_allocated_blocks for s in within) / len(within) / ended
    sequences = alone * sum(s.num_running for s in within) / len(within) / ended
    if held is None:
        return Held(blocks, sequences)
    keep = 1 - SAMPLE_PERIOD_S / STEADY_S
    return Held(
        keep * held.blocks_per_rate + (1 - keep) * blocks, keep * held.sequences_per_rate + (1 - keep) * sequences
    )
